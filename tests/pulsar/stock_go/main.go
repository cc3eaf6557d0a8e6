// A producer, a consumer and a reader of Pulsar's Go client with one service URL.
//
//	main URL TOPIC FIRST LAST
//
// It publishes IDs from FIRST to LAST twice as producer `p`, and prints a line for each of these: the IDs that a consumer
// of the subscription `s` gets up to LAST, those that a consumer without a queue gets from the beginning up to LAST, and
// those that a reader gets from the beginning until it has no next message.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"strings"

	"github.com/apache/pulsar-client-go/pulsar"
)

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func number(text string) int64 {
	n, err := strconv.ParseInt(text, 10, 64)
	must(err)
	return n
}

func main() {
	url, topic, first, last := os.Args[1], os.Args[2], number(os.Args[3]), number(os.Args[4])
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: url})
	must(err)
	defer client.Close()
	consumer, err := client.Subscribe(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "s", SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
		AckWithResponse: true,
	})
	must(err)
	producer, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic, Name: "p"})
	must(err)
	for range 2 {
		for id := first; id <= last; id++ {
			sequenceID := id
			message := pulsar.ProducerMessage{Payload: []byte(strconv.FormatInt(id, 10)), SequenceID: &sequenceID}
			producer.SendAsync(context.Background(), &message, func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
				must(err)
			})
		}
		must(producer.Flush())
	}
	slow, err := client.Subscribe(pulsar.ConsumerOptions{
		Topic: topic, SubscriptionName: "slow-" + os.Args[3], EnableZeroQueueConsumer: true,
		SubscriptionInitialPosition: pulsar.SubscriptionPositionEarliest,
	})
	must(err)
	reader, err := client.CreateReader(pulsar.ReaderOptions{Topic: topic, StartMessageID: pulsar.EarliestMessageID()})
	must(err)
	print(last, func() pulsar.Message {
		message, err := consumer.Receive(context.Background())
		must(err)
		must(consumer.Ack(message))
		return message
	})
	print(last, func() pulsar.Message {
		message, err := slow.Receive(context.Background())
		must(err)
		return message
	})
	ids := []string{}
	for reader.HasNext() {
		message, err := reader.Next(context.Background())
		must(err)
		ids = append(ids, string(message.Payload()))
	}
	fmt.Println(strings.Join(ids, " "))
}

// Prints the IDs. A sidecar's own entries do not come.
func print(last int64, next func() pulsar.Message) {
	ids := []string{}
	for {
		message := next()
		if kind, isOwn := message.Properties()["seqdedupe.kind"]; isOwn {
			log.Fatalf("a %s has come", kind)
		}
		ids = append(ids, string(message.Payload()))
		if ids[len(ids)-1] == strconv.FormatInt(last, 10) {
			break
		}
	}
	fmt.Println(strings.Join(ids, " "))
}
