// A producer of Pulsar's Go client, with the client's defaults, which batch.
//
//	flood URL TOPIC NAME COUNT BYTES
//
// It publishes COUNT messages of BYTES bytes as producer NAME, and prints the seconds until all have receipts.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
)

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func number(text string) int {
	n, err := strconv.Atoi(text)
	must(err)
	return n
}

func main() {
	url, topic, name, count, size := os.Args[1], os.Args[2], os.Args[3], number(os.Args[4]), number(os.Args[5])
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: url})
	must(err)
	defer client.Close()
	producer, err := client.CreateProducer(pulsar.ProducerOptions{Topic: topic, Name: name})
	must(err)
	receipts := make(chan struct{}, count)
	receipt := func(_ pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
		must(err)
		receipts <- struct{}{}
	}
	payload := make([]byte, size)
	began := time.Now()
	for range count {
		producer.SendAsync(context.Background(), &pulsar.ProducerMessage{Payload: payload}, receipt)
	}
	must(producer.Flush())
	for range count {
		<-receipts
	}
	fmt.Println(time.Since(began).Seconds())
}
