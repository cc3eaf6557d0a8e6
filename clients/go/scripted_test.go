package seqdedupe

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

const incarnation = 17

// A script is a server that the test plays: it answers Open and each message of a stream as the test says.
type script struct {
	pb.UnimplementedPublishServiceServer
	t       *testing.T
	address string
	open    func(*pb.OpenRequest) (*pb.OpenResponse, error)
	streams chan pb.PublishService_PublishStreamServer
	ends    chan error // what ends the stream that was taken last
	opens   atomic.Int32
	isOpen  atomic.Bool
}

func newScript(t *testing.T) *script {
	listener := first(net.Listen("tcp", "127.0.0.1:0"))
	s := &script{
		t: t, address: listener.Addr().String(), ends: make(chan error),
		streams: make(chan pb.PublishService_PublishStreamServer),
	}
	s.persisted(-1)
	server := grpc.NewServer(grpc.MaxRecvMsgSize(2 * maxBatchBytes))
	pb.RegisterPublishServiceServer(server, s)
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	return s
}

// publishing returns what sends a message with a publisher, and where the outcomes come.
func (s *script) publishing() (send func(), answers chan error) {
	p := first(newTestClient(s.t, s.address).NewPublisher("t", PublisherOptions{}))
	s.t.Cleanup(func() { p.Close() })
	answers = make(chan error, 1)
	try := func() { _, err := p.Send(s.t.Context(), []byte("a"), Message{}); answers <- err }
	return func() { go try() }, answers
}

func (s *script) persisted(persisted int64) {
	s.open = func(*pb.OpenRequest) (*pb.OpenResponse, error) { return opened(persisted), nil }
}

func opened(persisted int64) *pb.OpenResponse {
	return &pb.OpenResponse{
		Incarnation: incarnation, Term: 1, Epochs: []int64{1<<32 | 5}, Persisted: []int64{persisted},
		PersistedIndexes: []int64{-1}, PersistedMessageIds: []*pb.MessageId{{}},
	}
}

func (s *script) Open(_ context.Context, request *pb.OpenRequest) (*pb.OpenResponse, error) {
	s.opens.Add(1)
	if s.isOpen.Load() && (len(request.Epochs) != 1 || request.Epochs[0] != 1<<32|5) {
		s.t.Errorf("a resume without its epoch: %v", request)
	}
	answer, err := s.open(request)
	s.isOpen.CompareAndSwap(false, err == nil)
	return answer, err
}

func (s *script) PublishStream(stream pb.PublishService_PublishStreamServer) error {
	if m, err := stream.Recv(); err != nil || m.Topic != "persistent://public/default/t" {
		return status.Error(codes.InvalidArgument, fmt.Sprint(m, err))
	}
	select {
	case s.streams <- stream:
	case <-stream.Context().Done():
		return nil
	}
	select {
	case err := <-s.ends:
		return err
	case <-stream.Context().Done():
		return nil
	}
}

// frames receives until these IDs have come.
func (s *script) frames(stream pb.PublishService_PublishStreamServer, ids ...int64) []*pb.Frame {
	s.t.Helper()
	var frames []*pb.Frame
	for len(ids) > 0 {
		m, err := stream.Recv()
		if err != nil {
			s.t.Fatal(err)
		}
		for _, frame := range m.Frames {
			for _, id := range frame.Batch.SequenceIds {
				if len(ids) == 0 || id != ids[0] {
					s.t.Fatalf("ID %d came, and %v were to come", id, ids)
				}
				ids = ids[1:]
			}
			frames = append(frames, frame)
		}
	}
	return frames
}

func receiptsOf(index int64, frames ...*pb.Frame) *pb.PublishStreamResponse {
	answer := &pb.PublishStreamResponse{Incarnation: incarnation, Term: 1}
	for _, frame := range frames {
		answer.Receipts = append(answer.Receipts, &pb.Receipt{
			Frame: frame.Number, FirstIndex: index, FirstMessageId: &pb.MessageId{LedgerId: incarnation, EntryId: index, BatchIndex: -1},
		})
		index += int64(len(frame.Batch.SequenceIds))
	}
	return answer
}

func refusal(frame *pb.Frame, reason string, delay time.Duration) *pb.PublishStreamResponse {
	return &pb.PublishStreamResponse{Incarnation: incarnation, Term: 1, Refusals: []*pb.Refusal{
		{Frame: frame.Number, Reason: reason, Message: "refused", RetryDelayMs: delay.Milliseconds()},
	}}
}

func withDetails(code codes.Code, reason string, retry time.Duration) error {
	s, _ := status.New(code, reason).WithDetails(&errdetails.ErrorInfo{Reason: reason, Domain: errorDomain})
	if retry >= 0 {
		s, _ = s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(retry)})
	}
	return s.Err()
}

// one message is a batch.
var oneByOne = ProducerOptions{MaxBatchRows: 1}

func links(frames []*pb.Frame) (all []int64) {
	for _, frame := range frames {
		all = append(all, frame.Batch.PreviousSequenceIds...)
	}
	return all
}

func TestEveryWayInWhichAStreamBreaksIsResent(t *testing.T) {
	for _, end := range []error{
		nil, // OK
		status.Error(codes.Canceled, ""), status.Error(codes.DeadlineExceeded, ""), status.Error(codes.Internal, ""),
		status.Error(codes.Unknown, ""), status.Error(codes.Unavailable, ""), status.Error(codes.PermissionDenied, ""),
		status.Error(codes.ResourceExhausted, "trying to send message larger than max (2 vs. 1)"),
		withDetails(codes.Unavailable, "STREAM_IDLE", time.Millisecond), withDetails(codes.Unauthenticated, "TOKEN_EXPIRED", 0),
	} {
		for answered := range 3 { // how many of two frames have their receipts, and how many are stored
			for stored := answered; stored < 3; stored++ {
				t.Run(fmt.Sprintf("%v/%d/%d", status.Code(end), answered, stored), func(t *testing.T) {
					t.Parallel()
					s := newScript(t)
					p := openProducer(t, newTestClient(t, s.address), "t", "p", oneByOne)
					stream := <-s.streams
					receipts := []Receipt{send(t, p, 3, "a"), send(t, p, 7, "b")}
					frames := s.frames(stream, 3, 7)
					if answered > 0 {
						stream.Send(receiptsOf(0, frames[:answered]...))
						wait(t, receipts[answered-1])
					}
					s.persisted([]int64{-1, 3, 7}[stored])
					s.ends <- end
					if answered == 2 {
						receipts = append(receipts, send(t, p, 9, "c"))
					}
					stream = <-s.streams
					again, wantLinks := []int64{3, 7}, []int64{-1, 3}
					if answered == 1 {
						again, wantLinks = []int64{7}, []int64{3}
					} else if answered == 2 {
						again, wantLinks = []int64{9}, []int64{7}
					}
					frames = s.frames(stream, again...)
					if fmt.Sprint(links(frames)) != fmt.Sprint(wantLinks) {
						t.Error(links(frames))
					}
					stream.Send(receiptsOf(int64(answered), frames...))
					for _, r := range receipts {
						wait(t, r)
					}
				})
			}
		}
	}
}

func TestRefusalsAreSentAgainInOrderAfterTheDelay(t *testing.T) {
	s := newScript(t)
	p := openProducer(t, newTestClient(t, s.address), "t", "p", oneByOne)
	stream := <-s.streams
	receipts := []Receipt{send(t, p, 0, "a"), send(t, p, 1, "b")}
	frames := s.frames(stream, 0, 1)
	const delay = 200 * time.Millisecond
	began := time.Now()
	stream.Send(refusal(frames[0], "RECOVERING", delay))
	stream.Send(refusal(frames[1], "PREDECESSOR_MISSING", 0))
	frames = s.frames(stream, 0, 1) // on the same stream
	if time.Since(began) < delay {
		t.Error("it did not wait")
	}
	unknown := receiptsOf(-1, frames[0])
	unknown.Receipts[0].Verdicts = []pb.Verdict{pb.Verdict_VERDICT_UNKNOWN}
	stream.Send(unknown)
	stream.Send(refusal(frames[1], "PREDECESSOR_MISSING", 0))
	stream.Send(receiptsOf(0, s.frames(stream, 0, 1)...))
	for _, r := range receipts {
		wait(t, r)
	}
	if s.opens.Load() != 1 {
		t.Error("a refused frame needs no resume")
	}
	// A final refusal ends this and later messages, and no earlier ones.
	receipts = []Receipt{send(t, p, 2, "a"), send(t, p, 3, "b"), send(t, p, 4, "c")}
	frames = s.frames(stream, 2, 3, 4)
	stream.Send(refusal(frames[1], "INVALID_BATCH", -time.Millisecond))
	stream.Send(receiptsOf(2, frames[0]))
	wait(t, receipts[0])
	for _, r := range receipts[1:] {
		if _, err := r.Wait(t.Context()); !errors.Is(err, ErrInvalidRequest) || reasonOf(err) != "INVALID_BATCH" {
			t.Error(err)
		}
	}
	if _, err := p.Send(t.Context(), 5, Message{}); reasonOf(err) != "INVALID_BATCH" {
		t.Error(err)
	}
}

func TestAResumeThatShowsALossEndsTheProducer(t *testing.T) {
	for want, answer := range map[string]func() (*pb.OpenResponse, error){
		"DATA_LOSS": func() (*pb.OpenResponse, error) { return opened(2), nil },
		"FENCED":    func() (*pb.OpenResponse, error) { return opened(9), nil },
		"DATA_LOSS incarnation": func() (*pb.OpenResponse, error) {
			a := opened(5)
			a.Incarnation++
			return a, nil
		},
		"DATA_LOSS term": func() (*pb.OpenResponse, error) {
			a := opened(5)
			a.Term = 0
			return a, nil
		},
		"DATA_LOSS topic": func() (*pb.OpenResponse, error) { return nil, withDetails(codes.NotFound, "TOPIC_NOT_FOUND", -1) },
		"OUTCOME_UNKNOWN": func() (*pb.OpenResponse, error) {
			return nil, withDetails(codes.PermissionDenied, "NOT_ALLOWED", -1)
		},
	} {
		t.Run(want, func(t *testing.T) {
			s := newScript(t)
			p := openProducer(t, newTestClient(t, s.address), "t", "p", oneByOne)
			stream := <-s.streams
			r := send(t, p, 5, "a")
			stream.Send(receiptsOf(0, s.frames(stream, 5)...))
			wait(t, r)
			r = send(t, p, 6, "b")
			s.frames(stream, 6)
			s.open = func(*pb.OpenRequest) (*pb.OpenResponse, error) { return answer() }
			s.ends <- nil
			_, err := r.Wait(t.Context())
			if got := reasonOf(err); len(want) < len(got) || want[:len(got)] != got {
				t.Error(err)
			}
		})
	}
}

func TestAForgottenNameGoesOnAsNew(t *testing.T) {
	s := newScript(t)
	c, warned := newTestClient(t, s.address), new(bytes.Buffer)
	c.logger = slog.New(slog.NewTextHandler(warned, nil))
	p := openProducer(t, c, "t", "p", oneByOne)
	stream := <-s.streams
	r := send(t, p, 5, "a")
	stream.Send(receiptsOf(0, s.frames(stream, 5)...))
	wait(t, r)
	r = send(t, p, 6, "b")
	frames := s.frames(stream, 6)
	s.open = func(*pb.OpenRequest) (*pb.OpenResponse, error) {
		answer := opened(-1)
		answer.Forgotten = []uint32{0}
		return answer, nil
	}
	stream.Send(refusal(frames[0], "INVALID_EPOCH", -time.Millisecond)) // not final at first
	stream = <-s.streams
	frames = s.frames(stream, 6)
	if frames[0].Batch.PreviousSequenceIds[0] != -1 || s.opens.Load() != 2 {
		t.Error(frames[0].Batch.PreviousSequenceIds, s.opens.Load())
	}
	s.ends <- nil // a later resume repeats that it was forgotten
	stream = <-s.streams
	stream.Send(receiptsOf(1, s.frames(stream, 6)...))
	wait(t, r)
	if text := warned.String(); strings.Count(text, "level=WARN") != 1 || !strings.Contains(text, "producer=p") {
		t.Error(text)
	}
}

func TestSendWaitsForRoom(t *testing.T) {
	s := newScript(t)
	p := openProducer(t, newTestClient(t, s.address), "t", "p", ProducerOptions{MaxBatchRows: 1, MaxInFlightBatches: 2})
	stream := <-s.streams
	send(t, p, 0, "a")
	send(t, p, 1, "b")
	frames := s.frames(stream, 0, 1)
	short, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := p.Send(short, 2, Message{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	done := make(chan Receipt)
	go func() { done <- first(p.Send(t.Context(), 2, Message{})) }() // the one before was not queued
	stream.Send(receiptsOf(0, frames[0]))
	r := <-done
	stream.Send(receiptsOf(1, frames[1]))
	stream.Send(receiptsOf(2, s.frames(stream, 2)...))
	wait(t, r)
}

func TestADeliveryTimeoutEndsTheProducer(t *testing.T) {
	s := newScript(t)
	p := openProducer(t, newTestClient(t, s.address), "t", "p", ProducerOptions{DeliveryTimeout: 50 * time.Millisecond})
	<-s.streams
	_, err := send(t, p, 0, "a").Wait(t.Context())
	if !errors.Is(err, ErrOutcomeUnknown) {
		t.Error(err)
	}
	if _, err := p.Send(t.Context(), 1, Message{}); !errors.Is(err, ErrOutcomeUnknown) {
		t.Error(err)
	}
}

func TestARedirectIsFollowedOnlyToAddressesThatWereGiven(t *testing.T) {
	owner, other := newScript(t), newScript(t)
	notOwner := func(address string) func(*pb.OpenRequest) (*pb.OpenResponse, error) {
		return func(*pb.OpenRequest) (*pb.OpenResponse, error) {
			s, _ := status.New(codes.Unavailable, "not mine").WithDetails(
				&errdetails.ErrorInfo{Reason: "NOT_OWNER", Domain: errorDomain, Metadata: map[string]string{ownerAddress: address}},
				&errdetails.RetryInfo{})
			return nil, s.Err()
		}
	}
	other.open = notOwner(owner.address)
	openProducer(t, newTestClient(t, other.address+","+owner.address), "t", "p", oneByOne)
	<-owner.streams
	if owner.opens.Load() != 1 || other.opens.Load() > 1 {
		t.Error(owner.opens.Load(), other.opens.Load())
	}
	// The control: the client was given only the address of the other.
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	_, err := newTestClient(t, other.address).NewProducer(short, "t", "p", oneByOne)
	if reasonOf(err) != "NOT_OWNER" || owner.opens.Load() != 1 {
		t.Error(err, owner.opens.Load())
	}
	owner.ends <- nil
}

func TestRouteFollowsTheWeightsOfTheContract(t *testing.T) {
	s, err := parseSidecars("10.0.0.3:6660, 10.0.0.2:6660,10.0.0.1:6660,10.0.0.1:6660,*.Example.org")
	if err != nil {
		t.Fatal(err)
	}
	got := fmt.Sprint(s.inOrder("persistent://public/default/orders"))
	if got != "[10.0.0.1:6660 10.0.0.3:6660 10.0.0.2:6660]" {
		t.Error(got)
	}
	for address, ok := range map[string]bool{
		"10.0.0.2:6660": true, "a.example.org:1": true, "A.Example.org:1": true, "10.0.0.4:6660": false,
		"example.org:1": false, "elsewhere.org#.example.org:1": false, "unix:/x.example.org": false,
	} {
		if (s.allowed(address) != "") != ok {
			t.Error(address)
		}
	}
	for _, bad := range []string{"", "host", "host:", "host:x", "host:70000", "a:b:1", "unix:", "unix:/", "*.1", ":1", "a/b:1"} {
		if _, err := parseSidecars(bad); !errors.Is(err, ErrConfiguration) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

func TestATopicIsReplacedOnlyWhenTheLastOwnerSaysSoToo(t *testing.T) {
	for _, given := range []string{"a:1,b.svc:1", "a:1,*.svc"} { // it may be in a domain, and not in the list
		s := first(parseSidecars(given))
		r := newRoute(&s, "")
		r.address = "b.svc:1"
		if replaced, e := r.checkTerm(5, 0); replaced || e != nil {
			t.Fatal(given, replaced, e)
		}
		for range 2 {
			r.beginRound()
			r.address = "a:1"
			replaced, e := r.checkTerm(4, 5)
			if replaced || e == nil || e.Reason != "NOT_OWNER" {
				t.Fatal(given, replaced, e)
			}
			if !r.movesOn(e) || r.address != "b.svc:1" {
				t.Fatal(given, r.address)
			}
		}
		if replaced, e := r.checkTerm(4, 5); !replaced || e != nil {
			t.Error(given, replaced, e)
		}
		if replaced, e := r.checkTerm(5, 5); replaced || e != nil {
			t.Error(given, replaced, e)
		}
		if replaced, e := r.checkTerm(4, 5); replaced || e == nil { // the others count only since then
			t.Error(given, replaced, e)
		}
	}
}

func TestAPublisherNoticesThatATopicWasReplaced(t *testing.T) {
	for name, change := range map[string]func(*pb.PublishStreamResponse){
		"incarnation": func(a *pb.PublishStreamResponse) { a.Incarnation++ },
		"term":        func(a *pb.PublishStreamResponse) { a.Term = 0 },
		"index":       func(a *pb.PublishStreamResponse) { a.Receipts[0].FirstIndex = 0 },
		"control":     func(a *pb.PublishStreamResponse) {},
	} {
		t.Run(name, func(t *testing.T) {
			s := newScript(t)
			send, answers := s.publishing()
			send()
			stream := <-s.streams
			m := first(stream.Recv())
			stream.Send(receiptsOf(0, m.Frames...))
			if err := <-answers; err != nil {
				t.Fatal(err)
			}
			send()
			m = first(stream.Recv())
			answer := receiptsOf(1, m.Frames...)
			change(answer)
			stream.Send(answer)
			if err := <-answers; errors.Is(err, ErrDataLoss) != (name != "control") {
				t.Error(err)
			}
		})
	}
}

func TestAPublishWithoutAnAnswerIsNotCalledRefused(t *testing.T) {
	for _, isAnswered := range []bool{false, true} {
		s := newScript(t)
		send, answers := s.publishing()
		send()
		stream := <-s.streams
		m := first(stream.Recv())
		if isAnswered { // the control: the sidecar has not taken the frame
			stream.Send(refusal(m.Frames[0], "NOT_ALLOWED", -time.Millisecond))
		} else {
			s.ends <- status.Error(codes.Unavailable, "")
			<-s.streams
			s.ends <- withDetails(codes.Unauthenticated, "UNAUTHENTICATED", -1)
		}
		err := <-answers
		if (reasonOf(err) == "OUTCOME_UNKNOWN") == isAnswered || !errors.Is(err, ErrAccessDenied) {
			t.Error(isAnswered, err)
		}
	}
}

func TestAFinalErrorBeforeTheMetadataMeansThatNothingIsStored(t *testing.T) {
	for _, one := range []struct {
		isAccepted   bool
		reason, want string
	}{
		{false, "UNAUTHENTICATED", "UNAUTHENTICATED"},
		{true, "UNAUTHENTICATED", "OUTCOME_UNKNOWN"}, // the control
		{true, "TOPIC_NOT_FOUND", "TOPIC_NOT_FOUND"}, // there is no topic that could have it
	} {
		s := newScript(t)
		send, answers := s.publishing()
		send()
		stream := <-s.streams
		first(stream.Recv())
		if one.isAccepted {
			stream.SendHeader(nil)
		}
		s.ends <- withDetails(codes.Unauthenticated, one.reason, -1)
		if err := <-answers; reasonOf(err) != one.want {
			t.Error(one, err)
		}
	}
}

func TestAPublisherWaitsAsTheEndOfTheStreamAsks(t *testing.T) {
	s := newScript(t)
	send, answers := s.publishing()
	send()
	stream := <-s.streams
	first(stream.Recv())
	const delay = 300 * time.Millisecond
	began := time.Now()
	s.ends <- withDetails(codes.Unavailable, "STREAM_IDLE", delay)
	stream = <-s.streams
	if time.Since(began) < delay {
		t.Error("it did not wait")
	}
	stream.Send(receiptsOf(0, first(stream.Recv()).Frames...))
	if err := <-answers; err != nil {
		t.Error(err)
	}
}
