package seqdedupe

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

const (
	kills             = 3
	messagesUnderLoad = 20_000
)

// counted reads the topic and returns how many times each payload is in it, and checks each producer's order.
func counted(t *testing.T, c *Client, topic string) map[string]int {
	counts, last := map[string]int{}, map[string]int64{}
	for i, m := range readAll(t, c, topic) {
		counts[string(m.Payload)]++
		if before, known := last[m.ProducerName]; m.ProducerName != "" && known && m.SequenceID <= before {
			t.Errorf("%s: ID %d after %d", m.ProducerName, m.SequenceID, before)
		}
		if last[m.ProducerName] = m.SequenceID; m.Index != int64(i) {
			t.Fatal(m.Index, i)
		}
	}
	return counts
}

// killing kills the sidecar while the load runs, at several points of it.
func killing(s *sidecar, progress *atomic.Int64, total int64) {
	for k := range int64(kills) {
		eventually(s.t, "the load", func() bool { return progress.Load() > total*(k+1)/(kills+1) })
		s.kill()
		s.start()
	}
}

func TestAfterKillsEachMessageIsThereExactlyOnce(t *testing.T) {
	if testing.Short() {
		t.Skip("it kills a sidecar")
	}
	s := startSidecar(t)
	s.createTopic("ids", pb.DeduplicationMode_DEDUPLICATION_MODE_DEDUPLICATION_ID)
	c := newTestClient(t, s.address)
	var load sync.WaitGroup
	var progress atomic.Int64
	const producers = 4
	for n := range producers {
		p := openProducer(t, c, "t", fmt.Sprint("p", n), ProducerOptions{})
		load.Go(func() {
			for i := range messagesUnderLoad / producers {
				r, err := p.Send(t.Context(), int64(i), Message{Payload: fmt.Append(nil, n, "/", i)})
				if err != nil {
					t.Error(err)
					return
				}
				load.Go(func() {
					if published, err := r.Wait(t.Context()); err != nil || published.SequenceID != int64(i) {
						t.Error(published, err)
					}
					progress.Add(1)
				})
			}
		})
	}
	publisher := first(c.NewPublisher("ids", PublisherOptions{}))
	defer publisher.Close()
	stop, stopped := context.WithCancel(t.Context())
	var published atomic.Int64
	for range 8 {
		load.Go(func() {
			for stop.Err() == nil {
				id := fmt.Append(nil, published.Add(1))
				if _, err := publisher.Send(t.Context(), id, Message{Payload: id}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	read := make(chan int64)
	follower := first(c.NewReader("t", ReaderOptions{Follow: true}))
	defer follower.Close()
	go func() {
		next := int64(0)
		for ; next < messagesUnderLoad; next++ {
			if m, err := follower.Next(t.Context()); err != nil || m.Index != next {
				t.Error(m, err)
				break
			}
		}
		read <- next
	}()
	killing(s, &progress, messagesUnderLoad)
	eventually(t, "the receipts", func() bool { return progress.Load() == messagesUnderLoad })
	stopped()
	load.Wait()
	counts := counted(t, c, "t")
	for n := range producers {
		for i := range messagesUnderLoad / producers {
			if one := fmt.Sprint(n, "/", i); counts[one] != 1 {
				t.Fatalf("message %s is there %d times", one, counts[one])
			}
		}
	}
	if len(counts) != messagesUnderLoad || <-read != messagesUnderLoad {
		t.Error(len(counts))
	}
	counts = counted(t, c, "ids")
	for i := range published.Load() {
		if one := fmt.Sprint(i + 1); counts[one] != 1 {
			t.Fatalf("message %s is there %d times", one, counts[one])
		}
	}
	if len(counts) != int(published.Load()) {
		t.Error(len(counts))
	}
}

// The control: a client that numbers a resend anew, in a new session, stores the message twice. So the test above would
// see a double.
func TestAResendInANewSessionWithANewNumberIsADouble(t *testing.T) {
	s := startSidecar(t)
	c := newTestClient(t, s.address)
	for stored := range int64(2) {
		p := openProducer(t, c, "t", "p", ProducerOptions{})
		send(t, p, NextSequenceID, "x") // its receipt is lost: the sidecar and the process die
		eventually(t, "the message", func() bool {
			ends, err := c.Ends(t.Context(), "t")
			return err == nil && ends.Last.Index == stored
		})
		s.kill()
		gone, cancel := context.WithCancel(t.Context())
		cancel()
		p.Close(gone)
		s.start()
	}
	if counts := counted(t, c, "t"); counts["x"] != 2 {
		t.Error(counts)
	}
}

// The other control: a resend in a new session that takes the name back is refused to the old one, so that a client
// whose sessions did not resume with their epochs would end with FENCED.
func TestAnOpenWithoutEpochsFencesTheClientsOwnSession(t *testing.T) {
	s, topic := realSidecar(t), newTopic()
	c := newTestClient(t, s.address)
	p := openProducer(t, c, topic, "p", ProducerOptions{})
	wait(t, send(t, p, 0, "a"))
	conn := first(grpc.NewClient(s.address, grpc.WithTransportCredentials(insecure.NewCredentials())))
	defer conn.Close()
	request := &pb.OpenRequest{Topic: topic, ProducerNames: []string{"p"}}
	first(pb.NewPublishServiceClient(conn).Open(t.Context(), request))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, err := send(t, p, 1, "b").Wait(ctx); reasonOf(err) != "FENCED" {
		t.Error(err)
	}
}
