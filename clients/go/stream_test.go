package seqdedupe

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

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

func TestTheErrorOfASenderComesBeforeThatOfItsStream(t *testing.T) {
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for range 50 {
		s := &seat{stream: &stream{done: make(chan struct{}), err: errorf("UNREACHABLE", "")}, left: make(chan error, 1)}
		close(s.stream.done)
		s.left <- errorf("DATA_LOSS", "")
		if err := s.wait(ended); reasonOf(err) != "DATA_LOSS" {
			t.Fatal(err)
		}
	}
}

func TestABatchIsNeverLargerThanTheSidecarTakes(t *testing.T) {
	s := newScript(t)
	p := openProducer(t, newTestClient(t, s.address), "t", "p", ProducerOptions{MaxBatchBytes: maxBatchBytes})
	stream := <-s.streams
	send(t, p, 0, "a") // while it is in flight, batches fill up
	frames := s.frames(stream, 0)
	p.mu.Lock()
	p.options.Linger = time.Hour
	p.mu.Unlock()
	half := Message{Payload: make([]byte, maxBatchBytes/2-rowOverheadBytes)}
	first(p.Send(t.Context(), 1, half))
	first(p.Send(t.Context(), 2, half))
	go p.Flush(t.Context())
	stream.Send(receiptsOf(0, frames...))
	for _, frame := range s.frames(stream, 1, 2) {
		if size := proto.Size(frame.Batch); size > maxBatchBytes-batchOverheadBytes {
			t.Error(size)
		}
	}
}

type readScript struct {
	pb.UnimplementedReadServiceServer
	end chan error
}

func (readScript) GetLastMessageId(context.Context, *pb.GetLastMessageIdRequest) (*pb.GetLastMessageIdResponse, error) {
	return &pb.GetLastMessageIdResponse{Last: &pb.Position{Incarnation: incarnation, Index: 9}}, nil
}

func (s readScript) ReadStream(_ *pb.ReadStreamRequest, stream pb.ReadService_ReadStreamServer) error {
	return <-s.end // without metadata
}

// newReadScript returns a reader of a server that ends each stream as the test says.
func newReadScript(t *testing.T) (*Reader, readScript) {
	s := readScript{end: make(chan error)}
	listener := first(net.Listen("tcp", "127.0.0.1:0"))
	server := grpc.NewServer()
	pb.RegisterReadServiceServer(server, s)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	r := first(newTestClient(t, listener.Addr().String()).NewReader("t", ReaderOptions{Follow: true, Start: AtIndex(3)}))
	t.Cleanup(func() { r.Close() })
	r.incarnation = incarnation // known: it does not look at the ends
	return r, s
}

func TestAFailedStreamWithoutMetadataIsNotAccepted(t *testing.T) {
	r, s := newReadScript(t)
	go func() { s.end <- withDetails(codes.NotFound, "TOPIC_NOT_FOUND", -1) }()
	if _, err := r.Next(t.Context()); reasonOf(err) != "TOPIC_NOT_FOUND" || r.hasAnswered {
		t.Error(err, r.hasAnswered)
	}
}

func TestAReaderKeepsNoStreamThatHasFailed(t *testing.T) {
	r, _ := newReadScript(t)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	kept, failed := 0, 0
	for range 100 { // either is selected at random
		r.conn, r.cancel = first(r.client.dial(r.route.address)), func() {}
		r.answers = make(chan readAnswer, 1)
		r.answers <- readAnswer{err: status.Error(codes.Unavailable, "")}
		_, err := r.Next(ended)
		if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		switch {
		case r.answers == nil:
			failed++
		case len(r.answers) == 1:
			kept++
		default:
			t.Fatal("the error of the stream was lost")
		}
		r.disconnect()
	}
	if kept == 0 || failed == 0 {
		t.Error(kept, failed)
	}
}

func TestConcurrentCallsShareOneConnection(t *testing.T) {
	c := newTestClient(t, "127.0.0.1:1")
	connections := make(chan *connection, 20)
	for range cap(connections) {
		go func() { connections <- first(c.connection("127.0.0.1:1", true)) }()
	}
	for range cap(connections) {
		conn := <-connections
		if c.connections[conn.key] != conn {
			t.Error("a second connection")
		}
		defer c.release(conn, nil)
	}
	if users := c.connections[connectionKey{"127.0.0.1:1", true}].users; users != cap(connections) {
		t.Error(users)
	}
}

func TestABatchNumbersTheMessagesThatHaveNoID(t *testing.T) {
	s := newScript(t)
	s.persisted(4)
	p := openProducer(t, newTestClient(t, s.address), "t", "p", oneByOne)
	stream := <-s.streams
	ids := []int64{NextSequenceID, NextSequenceID, 9, NextSequenceID}
	if _, err := p.SendBatch(t.Context(), ids, make([]Message, 4)); err != nil {
		t.Fatal(err)
	}
	s.frames(stream, 5, 6, 9, 10)
}

func TestASecondCloseWaitsToo(t *testing.T) {
	s := newScript(t)
	p := openProducer(t, newTestClient(t, s.address), "t", "p", oneByOne)
	stream := <-s.streams
	send(t, p, 0, "a")
	frames := s.frames(stream, 0)
	closed := make(chan error, 2)
	go func() { closed <- p.Close(t.Context()) }()
	eventually(t, "the first call begins", func() bool { p.mu.Lock(); defer p.mu.Unlock(); return p.isClosed })
	go func() { closed <- p.Close(t.Context()) }()
	select {
	case err := <-closed:
		t.Error("it did not wait", err)
	case <-time.After(50 * time.Millisecond):
	}
	stream.Send(receiptsOf(0, frames...))
	for range 2 {
		if err := <-closed; err != nil {
			t.Error(err)
		}
	}
	if p.ctx.Err() == nil {
		t.Error("limitDelivery goes on")
	}
}
