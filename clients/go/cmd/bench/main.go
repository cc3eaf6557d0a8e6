// Bench measures a producer: ready batches of 200 messages of 100 bytes for some seconds, then one batch of one message
// in flight. It prints messages per second and the median latency in milliseconds.
//
//	go run ./cmd/bench ADDRESS TOPIC SECONDS
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"slices"
	"strconv"
	"time"

	"seqdedupe.dev/go"
)

const rows, size = 200, 100

func main() {
	seconds, err := strconv.ParseFloat(os.Args[3], 64)
	check(err)
	ctx := context.Background()
	client, err := seqdedupe.NewClient(os.Args[1], seqdedupe.ClientOptions{})
	check(err)
	producer, err := client.NewProducer(ctx, os.Args[2], "bench", seqdedupe.ProducerOptions{})
	check(err)
	messages := make([]seqdedupe.Message, rows)
	for i := range messages {
		messages[i].Payload = make([]byte, size)
	}
	length := time.Duration(seconds * float64(time.Second))
	began, sent := time.Now(), 0
	for time.Since(began) < length {
		_, err := producer.SendBatch(ctx, nil, messages)
		check(err)
		sent += rows
	}
	check(producer.Flush(ctx))
	rate := float64(sent) / time.Since(began).Seconds()
	var times []time.Duration
	for began = time.Now(); time.Since(began) < length/2; {
		start := time.Now()
		receipt, err := producer.Send(ctx, seqdedupe.NextSequenceID, messages[0])
		check(err)
		_, err = receipt.Wait(ctx)
		check(err)
		times = append(times, time.Since(start))
	}
	slices.Sort(times)
	fmt.Printf("%.0f %.3f\n", rate, float64(times[len(times)/2].Microseconds())/1000)
	check(producer.Close(ctx))
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}
