// A producer of Pulsar's Go client that is killed. `killed_producer.py` says what it does and prints.
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"math/rand"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/apache/pulsar-client-go/pulsar"
	"github.com/apache/pulsar-client-go/pulsar/backoff"
)

// The client's own policy waits for up to a minute between two tries.
type oftener struct{}

func (oftener) Next() time.Duration       { return 300 * time.Millisecond }
func (oftener) IsMaxBackoffReached() bool { return false }
func (oftener) Reset()                    {}

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

func why(err error) string {
	return strings.ReplaceAll(err.Error(), "\n", " ")
}

func main() {
	url, topic, name := os.Args[1], os.Args[2], os.Args[3]
	known, back, random := number(os.Args[4]), number(os.Args[5]), rand.New(rand.NewSource(number(os.Args[6])))
	pauseMs := number(os.Args[7])
	over := make(chan struct{})
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		close(over)
	}()
	client, err := pulsar.NewClient(pulsar.ClientOptions{URL: url})
	must(err)
	producer := open(client, topic, name, over)
	last := producer.LastSequenceID()
	fmt.Println("opened", last)
	next := max(1, max(last, known)+1-back)
	burst := back
	var answered sync.WaitGroup
	for isOver := false; !isOver; {
		end := next + burst + 1 + random.Int63n(29)
		fmt.Println("sent", next, end-1)
		for ; next < end; next++ {
			answered.Add(1)
			send(producer, name, next, &answered)
		}
		burst = 0
		select {
		case <-over:
			isOver = true
		case <-time.After(time.Duration(random.Int63n(pauseMs+1)) * time.Millisecond):
		}
	}
	answered.Wait()
	client.Close()
	fmt.Println("done")
}

func open(client pulsar.Client, topic, name string, over chan struct{}) pulsar.Producer {
	for {
		producer, err := client.CreateProducer(pulsar.ProducerOptions{
			Topic: topic, Name: name, SendTimeout: -1, CompressionType: pulsar.ZSTD,
			BatchingMaxPublishDelay: 2 * time.Millisecond,
			BackOffPolicyFunc:       func() backoff.Policy { return oftener{} },
		})
		if err == nil {
			return producer
		}
		fmt.Println("refused", why(err))
		select {
		case <-over:
			os.Exit(0)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

func send(producer pulsar.Producer, name string, id int64, answered *sync.WaitGroup) {
	message := pulsar.ProducerMessage{Payload: []byte(fmt.Sprintf("%s/%d", name, id)), SequenceID: &id}
	producer.SendAsync(context.Background(), &message, func(at pulsar.MessageID, _ *pulsar.ProducerMessage, err error) {
		if err != nil {
			fmt.Println("error", id, why(err))
		} else {
			fmt.Println("receipt", id, at.LedgerID(), at.EntryID(), at.BatchIdx())
		}
		answered.Done()
	})
}
