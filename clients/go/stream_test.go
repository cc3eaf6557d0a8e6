package seqdedupe

import (
	"testing"

	"google.golang.org/grpc/codes"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

func TestASeatThatTheSenderHasLeftGetsNothing(t *testing.T) {
	s := newScript(t)
	c := newTestClient(t, s.address)
	answer := &pb.PublishStreamResponse{Incarnation: incarnation + 1, Term: 1, Receipts: []*pb.Receipt{{Frame: 1}}}
	old := &seat{}

	publisher := &Publisher{client: c, route: newRoute(&c.sidecars, "t"), seat: &seat{}, out: map[uint64]*publish{1: {}}}
	publisher.ready = []*publish{{batch: &pb.Batch{}}}
	publisher.history = history{hasReceipts: true, incarnation: incarnation}
	if frame, _ := publisher.nextFrame(old); frame != nil || len(publisher.ready) != 1 {
		t.Error(frame, publisher.ready)
	}
	if err := publisher.take(old, answer, answer.Receipts, nil); err != nil {
		t.Error(err)
	}
	if frame, _ := publisher.nextFrame(publisher.seat); frame == nil { // the control
		t.Error("the present seat gets no frame")
	}

	producer := openProducer(t, c, "t", "p", oneByOne)
	stream := <-s.streams
	s.open = func(*pb.OpenRequest) (*pb.OpenResponse, error) {
		return nil, withDetails(codes.Unavailable, "RECOVERING", 0)
	}
	send(t, producer, 0, "a")
	s.frames(stream, 0)
	s.ends <- nil
	eventually(t, "the producer leaves its seat", func() bool {
		producer.mu.Lock()
		defer producer.mu.Unlock()
		return producer.seat == nil
	})
	producer.mu.Lock()
	producer.queue.rewind()
	producer.mu.Unlock()
	if frame, _ := producer.nextFrame(old); frame != nil {
		t.Error(frame)
	}
	if err := producer.take(old, answer, answer.Receipts, nil); err != nil {
		t.Error(err)
	}
}
