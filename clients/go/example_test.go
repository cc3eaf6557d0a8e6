package seqdedupe_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"seqdedupe.dev/go"
)

// A producer sends everything after the last durable message of its name, and waits for the receipts.
func ExampleClient_NewProducer() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	client, err := seqdedupe.NewClient("127.0.0.1:6660", seqdedupe.ClientOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	producer, err := client.NewProducer(ctx, "orders", "order-service", seqdedupe.ProducerOptions{})
	if err != nil {
		log.Fatal(err)
	}
	source := []string{"first", "second", "third"} // the sequence ID is the place in the source
	var receipts []seqdedupe.Receipt
	for id := producer.LastSequenceID() + 1; id < int64(len(source)); id++ {
		receipt, err := producer.Send(ctx, id, seqdedupe.Message{Payload: []byte(source[id])})
		if err != nil {
			log.Fatal(err)
		}
		receipts = append(receipts, receipt)
	}
	for _, receipt := range receipts {
		published, err := receipt.Wait(ctx)
		switch {
		case errors.Is(err, seqdedupe.ErrFenced):
			log.Fatal("another process uses this name: ", err)
		case err != nil:
			log.Fatal(err)
		}
		fmt.Println(published.SequenceID, published.Verdict, published.Index)
	}
	if err := producer.Close(ctx); err != nil {
		log.Fatal(err)
	}
}

// A publisher sends messages that have an ID but no sequence, such as webhooks.
func ExampleClient_NewPublisher() {
	client, err := seqdedupe.NewClient("127.0.0.1:6660", seqdedupe.ClientOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	publisher, err := client.NewPublisher("webhooks", seqdedupe.PublisherOptions{})
	if err != nil {
		log.Fatal(err)
	}
	defer publisher.Close()
	published, err := publisher.Send(context.Background(), []byte("evt_1"), seqdedupe.Message{Payload: []byte("{}")})
	var e *seqdedupe.Error
	if errors.As(err, &e) {
		log.Fatal(e.Reason)
	}
	fmt.Println(published.Verdict)
}

// A reader with a cursor goes on where the cursor is.
func ExampleClient_NewReader() {
	ctx := context.Background()
	client, err := seqdedupe.NewClient("10.0.0.1:6660,10.0.0.2:6660", seqdedupe.ClientOptions{
		Credentials: &seqdedupe.Credentials{TokenFile: "/run/secrets/token", CAFile: "/etc/ssl/sidecars.pem"},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	reader, err := client.NewReader("orders", seqdedupe.ReaderOptions{
		Follow: true, Cursor: client.Cursor("orders", "mailer"),
	})
	if err != nil {
		log.Fatal(err)
	}
	defer reader.Close()
	for message, err := range reader.All(ctx) {
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(message.Index, string(message.Payload))
		if err := reader.SavePosition(ctx); err != nil {
			log.Fatal(err)
		}
	}
}
