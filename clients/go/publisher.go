package seqdedupe

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"slices"
	"sort"
	"sync"
	"time"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

const (
	maxDeduplicationIDBytes = 255
	// maxPendingBytes wait for receipts in a publisher. A call that would exceed it waits for room.
	maxPendingBytes = 64 << 20
	// maxRuns is the number of runs of indexes that a publisher remembers. Of more runs, the lowest is dropped.
	maxRuns = 4096
)

// PublisherOptions configures a [Publisher]. Zero values mean the defaults.
type PublisherOptions struct {
	// DeliveryTimeout limits each call; default two minutes. Negative: only the call's context limits it.
	DeliveryTimeout time.Duration
}

// Publisher sends to one topic of deduplication IDs. It is safe for concurrent use; concurrent calls have no order.
//
// After [ErrOutcomeUnknown], the publisher goes on, and it is safe to repeat the call with the same ID. After
// [ErrAccessDenied], [ErrNotFound] or [ErrDataLoss], the publisher has ended.
type Publisher struct {
	client  *Client
	topic   string
	timeout time.Duration
	ctx     context.Context
	cancel  context.CancelFunc
	work    chan struct{}
	ended   chan struct{}

	mu      sync.Mutex
	ready   []*publish
	out     map[uint64]*publish
	pending int           // bytes
	room    chan struct{} // closed when there is room, if somebody waits
	seat    *seat
	route   *route
	delays  delays
	resends *time.Timer // while sending pauses
	history history
	failure error
	refusal *Error // why nothing has become durable lately
	answers bool   // a sidecar has answered
}

// A publish is the batch of one call, until it has all receipts.
type publish struct {
	outcome
	batch *pb.Batch
	size  int
	err   error
	done  chan struct{}
	over  bool // the publisher's lock guards it
	// isUncertain: a frame got no answer, or an answer that leaves its outcome open. A later refusal proves nothing.
	isUncertain bool
}

// refuse ends the batch with this error, or with OUTCOME_UNKNOWN if an earlier frame may have taken effect.
func (p *publish) refuse(e *Error) {
	if p.isUncertain && !e.isTemporary() && !errors.Is(e, ErrNotFound) && !errors.Is(e, ErrDataLoss) {
		e = errorf("OUTCOME_UNKNOWN", "what was sent before may be in the log or not: %v", e).with(e)
	}
	p.end(e)
}

func (p *publish) end(err error) {
	if !p.over {
		p.over, p.err = true, err
		close(p.done)
	}
}

// NewPublisher returns a publisher to an existing topic of deduplication IDs. It connects at the first call.
func (c *Client) NewPublisher(topic string, options PublisherOptions) (*Publisher, error) {
	full, err := topicName(topic)
	if err != nil {
		return nil, err
	}
	if options.DeliveryTimeout == 0 {
		options.DeliveryTimeout = defaultDeliveryTimeout
	}
	p := &Publisher{
		client: c, topic: full, timeout: options.DeliveryTimeout,
		work: make(chan struct{}, 1), ended: make(chan struct{}),
		out: map[uint64]*publish{}, route: newRoute(&c.sidecars, full),
		delays: delays{longest: time.Second},
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	go p.run()
	return p, nil
}

// Send sends a message with an ID of 1 to 255 bytes, and returns when the message is in the log. A nil ID means a new
// UUID of version 7, which the message keeps when it is sent again.
func (p *Publisher) Send(ctx context.Context, deduplicationID []byte, m Message) (Published, error) {
	all, err := p.SendBatch(ctx, [][]byte{deduplicationID}, []Message{m})
	if err != nil {
		return Published{}, err
	}
	return all[0], nil
}

// SendBatch sends at most 65,536 messages and 8 MiB, and returns when all of them are in the log. If an ID occurs twice
// in the batch, the second message is a Dup. Without IDs, all messages get new ones.
func (p *Publisher) SendBatch(ctx context.Context, deduplicationIDs [][]byte, messages []Message) ([]Published, error) {
	if rows := len(messages); rows == 0 || rows > maxBatchRows || (deduplicationIDs != nil && len(deduplicationIDs) != rows) {
		return nil, errorf("INVALID_BATCH", "a batch of %d messages and %d IDs: it should have 1 to %d",
			rows, len(deduplicationIDs), maxBatchRows)
	}
	var c columns
	c.reserve(messages)
	for i := range messages {
		size, err := messages[i].size()
		if err != nil {
			return nil, err
		}
		id := []byte(nil)
		if deduplicationIDs != nil {
			id = deduplicationIDs[i]
		}
		if id == nil {
			id = newID()
		}
		if len(id) == 0 || len(id) > maxDeduplicationIDBytes {
			return nil, errorf("INVALID_DEDUPLICATION_ID", "the deduplication ID of row %d has %d bytes: it should have 1 to %d",
				i, len(id), maxDeduplicationIDBytes)
		}
		c.add(&messages[i], size+len(id))
		c.deduplication.add(id)
	}
	if c.size+batchOverheadBytes > maxBatchBytes {
		return nil, tooLarge(c.size)
	}
	one := &publish{batch: c.batch(), size: c.size, done: make(chan struct{})}
	one.rows = len(messages)
	if p.timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, p.timeout)
		defer cancel()
	}
	return p.deliver(ctx, one)
}

func (p *Publisher) deliver(ctx context.Context, one *publish) ([]Published, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.failure == nil && p.pending > 0 && p.pending+one.size > maxPendingBytes {
		if p.room == nil {
			p.room = make(chan struct{})
		}
		room := p.room
		p.mu.Unlock()
		select {
		case <-room:
		case <-ctx.Done():
		}
		p.mu.Lock()
		if ctx.Err() != nil {
			return nil, p.givenUp(ctx)
		}
	}
	if p.failure != nil {
		return nil, p.failure
	}
	p.pending += one.size
	p.ready = append(p.ready, one)
	p.wake()
	p.mu.Unlock()
	select {
	case <-one.done:
	case <-ctx.Done():
	}
	p.mu.Lock()
	p.pending -= one.size
	if p.room != nil {
		close(p.room)
		p.room = nil
	}
	if !one.over {
		one.end(p.givenUp(ctx))
		p.ready = slices.DeleteFunc(p.ready, func(other *publish) bool { return other == one })
	}
	if one.err != nil {
		return nil, one.err
	}
	all := make([]Published, one.rows)
	for row := range all {
		all[row] = one.at(row)
	}
	return all, nil
}

// givenUp returns the error of a call whose context has ended, or nil.
func (p *Publisher) givenUp(ctx context.Context) error {
	if ctx.Err() == nil {
		return nil
	}
	what := "no receipt from " + p.topic + " in time; what was sent may be in the log or not"
	if p.refusal != nil {
		what += ": " + p.refusal.Error()
	}
	return ended(ctx, what)
}

// Close ends the publisher. Calls in progress return OUTCOME_UNKNOWN.
func (p *Publisher) Close() error {
	p.cancel()
	<-p.ended
	p.mu.Lock()
	defer p.mu.Unlock()
	p.fail(errorf("OUTCOME_UNKNOWN", "the publisher of %s was closed", p.topic))
	p.failure = errorf("INVALID_REQUEST", "the publisher of %s was closed: nothing was sent", p.topic)
	return nil
}

func (p *Publisher) wake() {
	if p.seat != nil {
		p.seat.ready()
	}
	select {
	case p.work <- struct{}{}:
	default:
	}
}

func (p *Publisher) fail(err *Error) {
	if p.failure == nil {
		p.failure = err
	}
	for _, one := range p.out {
		one.refuse(err)
	}
	for _, one := range p.ready {
		one.refuse(err)
	}
	clear(p.out)
	p.ready = nil
}

func (p *Publisher) run() {
	defer close(p.ended)
	for {
		p.mu.Lock()
		isIdle := len(p.ready) == 0
		p.mu.Unlock()
		if isIdle {
			select {
			case <-p.work:
				continue
			case <-p.ctx.Done():
				return
			}
		}
		err := p.connect()
		if p.ctx.Err() != nil {
			return
		}
		goesOn, delay := p.after(err)
		if !goesOn || (delay > 0 && sleep(p.ctx, delay) != nil) {
			return
		}
	}
}

// connect sends frames and handles answers until the stream ends. What has no receipt is then sent again.
func (p *Publisher) connect() error {
	p.mu.Lock()
	address := p.route.address
	p.history.floor = p.history.durable // the requests of this stream follow all earlier receipts
	p.mu.Unlock()
	err := p.client.attend(p.ctx, address, p.topic, p)
	p.mu.Lock()
	defer p.mu.Unlock()
	tookNone := asError(err, address).tookNone
	numbers := make([]uint64, 0, len(p.out))
	for number := range p.out {
		numbers = append(numbers, number)
	}
	slices.Sort(numbers)
	again := make([]*publish, 0, len(numbers)+len(p.ready))
	for _, number := range numbers {
		p.out[number].isUncertain = p.out[number].isUncertain || !tookNone
		again = append(again, p.out[number])
	}
	p.ready = append(again, p.ready...)
	clear(p.out)
	return err
}

// after handles the end of a connection, as [Producer.after] does.
func (p *Publisher) after(err error) (bool, time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	said := asError(err, p.route.address)
	e := p.route.doubted(said)
	if !e.isTemporary() {
		if said.Reason == "TOPIC_NOT_FOUND" && p.history.hasReceipts {
			e = errorf("DATA_LOSS", "the sidecar does not know the topic for which it has sent receipts: %s", e.Message).with(e)
		}
		p.fail(e)
		return false, 0
	}
	if e.Reason == "STREAM_IDLE" && len(p.ready) == 0 {
		return true, 0 // run waits until there is something to send
	}
	p.refusal = e
	movesOn := p.route.movesOn(e)
	if e.Reason == "NOT_A_SIDECAR" && !movesOn && !p.answers {
		for _, one := range p.ready {
			one.refuse(e)
		}
		p.ready = nil
	}
	if movesOn {
		return true, 0
	}
	return true, max(p.delays.next(), e.RetryDelay)
}

func (p *Publisher) sit(s *seat) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seat = s
}

// nextFrame is for the stream.
func (p *Publisher) nextFrame(s *seat) (*pb.Frame, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.seat != s { // the frame would get no answer
		return nil, 0
	}
	for p.resends == nil && len(p.ready) > 0 {
		one := p.ready[0]
		p.ready = p.ready[1:]
		if one.over {
			continue
		}
		number := frameNumbers.Add(1)
		p.out[number] = one
		return &pb.Frame{Number: number, Batch: one.batch}, one.size
	}
	return nil, 0
}

// take is for the stream.
func (p *Publisher) take(s *seat, answer *pb.PublishStreamResponse, receipts []*pb.Receipt, refusals []*pb.Refusal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.seat != s {
		return nil
	}
	p.answers = true
	if len(receipts) > 0 {
		if e := p.check(answer, receipts); e != nil {
			return e
		}
	}
	var delay time.Duration
	for _, r := range receipts {
		one := p.out[r.Frame]
		if one == nil {
			continue
		}
		delete(p.out, r.Frame)
		p.refusal = nil
		p.route.goesWell()
		if _, all := one.record(r); all {
			one.end(nil)
		} else { // copies are in flight, from this client or another one
			one.isUncertain = true
			p.ready = append(p.ready, one)
			delay = max(delay, p.delays.next())
		}
	}
	if delay == 0 && len(receipts) > 0 {
		p.delays.last = 0
	}
	var moved *Error
	for _, r := range refusals {
		one := p.out[r.Frame]
		if one == nil {
			continue
		}
		delete(p.out, r.Frame)
		why := p.route.believed(refusalError(r), answer.Term, p.history.term)
		if !why.isTemporary() {
			one.refuse(why)
			continue
		}
		// What was in flight when the owner changed, or the log failed, may be stored.
		one.isUncertain = one.isUncertain || why.Reason == "NOT_OWNER" || why.Reason == "OUTCOME_UNKNOWN"
		p.ready = append(p.ready, one)
		if passes(why) || p.route.hasLasted(why) {
			moved = why
			continue
		}
		p.refusal = why
		delay = max(delay, p.delays.next(), why.RetryDelay)
	}
	if delay > 0 && p.resends == nil {
		p.resends = time.AfterFunc(delay, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			p.resends = nil
			p.wake()
		})
	}
	if moved != nil {
		return moved
	}
	return nil
}

// check compares an answer with earlier receipts. A former owner answers duplicates from memory, with a lower term.
func (p *Publisher) check(answer *pb.PublishStreamResponse, receipts []*pb.Receipt) *Error {
	isReplaced, e := p.route.checkTerm(answer.Term, p.history.term)
	if e != nil {
		return e
	}
	if isReplaced {
		return errorf("DATA_LOSS", "every sidecar answers with an older state than before: term %d (%d before)",
			answer.Term, p.history.term)
	}
	if e := p.history.take(answer); e != nil {
		return e
	}
	for _, r := range receipts {
		one := p.out[r.Frame]
		if one == nil {
			continue
		}
		if !fits(r, one.rows) {
			return errorf("NOT_A_SIDECAR", "a receipt does not fit its frame, which has %d rows", one.rows)
		}
		if rows := storedRows(r, one.rows); rows > 0 {
			if e := p.history.given(r.FirstIndex, int64(rows)); e != nil {
				return e
			}
		}
	}
	return nil
}

// A history has the facts about a topic that receipts have told. An answer that contradicts them comes from an older copy
// of the topic's log, or from a later topic of the same name. Receipts arrive in any order, and a duplicate has the index
// of its original, so a low index alone proves nothing.
type history struct {
	hasReceipts bool
	incarnation int64
	term        int64
	durable     int64 // everything below this index is durable
	floor       int64 // the value of durable when the stream began
	firsts      []int64
	nexts       []int64 // the runs of indexes given to new messages, rising
}

func (h *history) take(answer *pb.PublishStreamResponse) *Error {
	if h.hasReceipts && answer.Incarnation != h.incarnation {
		return errorf("DATA_LOSS", "the topic was recreated: its incarnation is %d, and was %d before",
			answer.Incarnation, h.incarnation)
	}
	if 0 < answer.DurableIndex && answer.DurableIndex < h.floor {
		return errorf("DATA_LOSS", "the topic ends before index %d, and was durable up to %d before",
			answer.DurableIndex, h.floor)
	}
	h.hasReceipts, h.incarnation, h.term = true, answer.Incarnation, max(h.term, answer.Term)
	h.durable = max(h.durable, answer.DurableIndex)
	return nil
}

// given records that new messages have got these indexes.
func (h *history) given(first, rows int64) *Error {
	next := first + rows
	at := sort.Search(len(h.firsts), func(i int) bool { return h.firsts[i] >= next })
	if at > 0 && h.nexts[at-1] > first {
		return errorf("DATA_LOSS", "index %d was given to another message before", max(first, h.firsts[at-1]))
	}
	h.durable = max(h.durable, next)
	after := at < len(h.firsts) && h.firsts[at] == next
	switch {
	case at > 0 && h.nexts[at-1] == first && after:
		h.nexts[at-1] = h.nexts[at]
		h.firsts, h.nexts = slices.Delete(h.firsts, at, at+1), slices.Delete(h.nexts, at, at+1)
	case at > 0 && h.nexts[at-1] == first:
		h.nexts[at-1] = next
	case after:
		h.firsts[at] = first
	default:
		h.firsts, h.nexts = slices.Insert(h.firsts, at, first), slices.Insert(h.nexts, at, next)
	}
	if len(h.firsts) > maxRuns {
		h.firsts, h.nexts = h.firsts[1:], h.nexts[1:]
	}
	return nil
}

// newID returns a UUID of version 7: the time in milliseconds, then random bits.
func newID() []byte {
	id := make([]byte, 16)
	rand.Read(id[6:])
	var stamp [8]byte
	binary.BigEndian.PutUint64(stamp[:], uint64(time.Now().UnixMilli()))
	copy(id, stamp[2:])
	id[6], id[8] = id[6]&0x0f|0x70, id[8]&0x3f|0x80
	return id
}
