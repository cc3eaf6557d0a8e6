package seqdedupe

import (
	"context"
	"io"
	"sync"
	"time"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

const (
	// answerTimeout: if frames are in flight and no answer comes for this time, the connection counts as broken.
	answerTimeout = 30 * time.Second
	// fullMessageBytes is the size at which a message takes no more frames: a larger one is not more efficient.
	fullMessageBytes = 160 << 10
	maxFrames        = 256
)

// A sender is a producer or publisher, as a stream sees it.
type sender interface {
	// sit notes the sender's seat, nil: none.
	sit(s *seat)
	// nextFrame returns the next frame to send now and its size, or nil. A seat that the sender has left gets none.
	nextFrame(s *seat) (*pb.Frame, int)
	// take handles the answers to the sender's frames. Only this sender leaves the stream after an error. Answers for a
	// seat that the sender has left change nothing.
	take(s *seat, answer *pb.PublishStreamResponse, receipts []*pb.Receipt, refusals []*pb.Refusal) error
}

// A seat is the place of a sender on a stream.
type seat struct {
	stream   *stream
	sender   sender
	left     chan error
	isQueued bool // whether the seat waits for its turn; the stream's lock guards it
	isGone   bool
}

type streamKey struct{ address, topic string }

// A stream is a publish stream to one topic, which several senders share. They take turns, one frame at a time. When the
// stream ends, all senders receive the reason.
type stream struct {
	client *Client
	key    streamKey
	conn   *connection
	ctx    context.Context
	cancel context.CancelCauseFunc
	users  int // the client's lock guards it

	mu         sync.Mutex
	turns      []*seat
	frames     map[uint64]*seat // those that wait for their answers
	answeredAt time.Time
	work       chan struct{}
	err        *Error
	done       chan struct{}
}

// join takes a seat on the stream to this topic at this sidecar.
func (c *Client) join(address, topic string, s sender) (*seat, error) {
	key := streamKey{address, topic}
	c.mu.Lock()
	st := c.streams[key]
	if st != nil {
		select {
		case <-st.done:
			st = nil
		default:
			st.users++
		}
	}
	c.mu.Unlock()
	if st == nil {
		conn, err := c.connection(address, true)
		if err != nil {
			return nil, err
		}
		st = &stream{
			client: c, key: key, conn: conn, users: 1,
			frames: map[uint64]*seat{}, work: make(chan struct{}, 1), done: make(chan struct{}),
		}
		st.ctx, st.cancel = context.WithCancelCause(context.Background())
		c.mu.Lock()
		c.streams[key] = st // two senders may have begun one stream each: both go on
		c.mu.Unlock()
		go st.run()
	}
	return &seat{stream: st, sender: s, left: make(chan error, 1)}, nil
}

// attend keeps a sender on the stream to this topic at this sidecar, until the sender, the stream or the context ends.
// Returns the error with which it has ended.
func (c *Client) attend(ctx context.Context, address, topic string, p sender) error {
	s, err := c.join(address, topic, p)
	if err != nil {
		return err
	}
	p.sit(s)
	s.ready()
	err = s.wait(ctx)
	s.leave()
	p.sit(nil)
	return err
}

// ready tells the stream that the sender may have a frame to send.
func (s *seat) ready() {
	st := s.stream
	st.mu.Lock()
	if !s.isQueued && !s.isGone {
		s.isQueued = true
		st.turns = append(st.turns, s)
	}
	st.mu.Unlock()
	select {
	case st.work <- struct{}{}:
	default:
	}
}

// wait returns the error with which the sender or the stream has ended.
func (s *seat) wait(ctx context.Context) error {
	select {
	case err := <-s.left:
		return err
	case <-s.stream.done:
	case <-ctx.Done():
	}
	select {
	case err := <-s.left: // the sender's own error says more
		return err
	default:
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return s.stream.err
}

// leave gives the seat up. Without senders, the stream ends.
func (s *seat) leave() {
	st, c := s.stream, s.stream.client
	st.mu.Lock()
	s.isGone = true
	st.mu.Unlock()
	c.mu.Lock()
	st.users--
	if st.users == 0 {
		if c.streams[st.key] == st {
			delete(c.streams, st.key)
		}
		st.cancel(errorf("STREAM_IDLE", "the stream to %s has no senders", st.key.address))
	}
	c.mu.Unlock()
}

func (st *stream) run() {
	st.err = st.exchange()
	st.cancel(st.err)
	st.client.release(st.conn, st.err)
	close(st.done)
}

// exchange sends frames and passes answers on until the stream ends.
func (st *stream) exchange() *Error {
	address := st.key.address
	slot := time.AfterFunc(callTimeout, func() {
		st.cancel(errorf("TOO_MANY_STREAMS", "the connection to %s has no free stream", address))
	})
	call, err := pb.NewPublishServiceClient(st.conn.ClientConn).PublishStream(st.ctx)
	slot.Stop()
	if err != nil {
		return st.reason(err)
	}
	if err := call.Send(&pb.PublishStreamRequest{Topic: st.key.topic}); err == nil {
		go st.write(call)
	}
	go st.watch()
	for {
		answer, err := call.Recv()
		if err != nil {
			e := st.reason(err)
			if header, _ := call.Header(); header == nil && st.ctx.Err() == nil && !e.isTemporary() {
				e.tookNone = true // a sidecar accepts a stream, with metadata, before it takes a frame
			}
			return e
		}
		if e := st.take(answer); e != nil {
			return e
		}
	}
}

// reason returns why the stream has ended: the client's own reason, if it has ended the stream.
func (st *stream) reason(err error) *Error {
	if st.ctx.Err() != nil {
		return asError(context.Cause(st.ctx), st.key.address)
	}
	if err == io.EOF {
		return errorf("UNREACHABLE", "the sidecar at %s ended the stream", st.key.address)
	}
	return st.conn.err(err)
}

// write sends what is ready. After an error, the receiving side has the reason.
func (st *stream) write(call pb.PublishService_PublishStreamClient) {
	for {
		frames := st.gather()
		if len(frames) == 0 {
			select {
			case <-st.work:
				continue
			case <-st.ctx.Done():
				return
			}
		}
		if call.Send(&pb.PublishStreamRequest{Frames: frames}) != nil {
			return
		}
	}
}

// gather returns the frames that are ready, for one message.
func (st *stream) gather() (frames []*pb.Frame) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for size := 0; len(st.turns) > 0 && size < fullMessageBytes && len(frames) < maxFrames; {
		s := st.turns[0]
		st.turns[0] = nil
		st.turns = st.turns[1:]
		s.isQueued = false
		if s.isGone {
			continue
		}
		st.mu.Unlock() // a sender's lock is never taken within the stream's
		frame, bytes := s.sender.nextFrame(s)
		st.mu.Lock()
		if frame == nil {
			continue
		}
		if len(st.frames) == 0 {
			st.answeredAt = time.Now()
		}
		st.frames[frame.Number] = s
		frames = append(frames, frame)
		size += bytes
		if !s.isQueued {
			s.isQueued = true
			st.turns = append(st.turns, s)
		}
	}
	return frames
}

func (st *stream) watch() {
	ticks := time.NewTicker(answerTimeout / 10)
	defer ticks.Stop()
	for {
		select {
		case <-st.ctx.Done():
			return
		case <-ticks.C:
		}
		st.mu.Lock()
		silent := len(st.frames) > 0 && time.Since(st.answeredAt) > answerTimeout
		st.mu.Unlock()
		if silent {
			st.cancel(errorf("OUTCOME_UNKNOWN", "%s has not answered for %v", st.key.address, answerTimeout))
		}
	}
}

// take passes an answer on to the senders whose frames it names.
func (st *stream) take(answer *pb.PublishStreamResponse) *Error {
	if answer.Incarnation == 0 && len(answer.Receipts)+len(answer.Refusals) > 0 {
		return errorf("NOT_A_SIDECAR", "%s answered without the topic's incarnation", st.key.address)
	}
	type told struct {
		seat     *seat
		receipts []*pb.Receipt
		refusals []*pb.Refusal
	}
	var all []told
	st.mu.Lock()
	st.answeredAt = time.Now()
	of := func(frame uint64) *told {
		s := st.frames[frame]
		delete(st.frames, frame)
		if s == nil || s.isGone {
			return &told{}
		}
		for i := range all {
			if all[i].seat == s {
				return &all[i]
			}
		}
		all = append(all, told{seat: s})
		return &all[len(all)-1]
	}
	for _, r := range answer.Receipts {
		t := of(r.Frame)
		t.receipts = append(t.receipts, r)
	}
	for _, r := range answer.Refusals {
		t := of(r.Frame)
		t.refusals = append(t.refusals, r)
	}
	st.mu.Unlock()
	for _, t := range all {
		if err := t.seat.sender.take(t.seat, answer, t.receipts, t.refusals); err != nil {
			st.mu.Lock()
			t.seat.isGone = true
			st.mu.Unlock()
			t.seat.left <- err
			continue
		}
		t.seat.ready()
	}
	return nil
}
