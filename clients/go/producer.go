package seqdedupe

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

// openTimeout limits the opening of a producer. Resuming a session has no limit.
const openTimeout = 30 * time.Second

// NextSequenceID stands for the sequence ID after [Producer.LastSequenceID].
const NextSequenceID = -1

// ProducerOptions configures a [Producer]. Zero values mean the defaults.
type ProducerOptions struct {
	// Linger is the time after which a batch that is not full is sent; default 1 ms. While nothing is in flight, a
	// batch is sent at once.
	Linger time.Duration
	// MaxBatchRows is the number of messages in a full batch; default 1,000, at most 65,536.
	MaxBatchRows int
	// MaxBatchBytes is about the size of a full batch; default 128 KiB, at most 8 MiB.
	MaxBatchBytes int
	// MaxInFlightBatches is the number of batches without a receipt at which Send waits; default 32.
	MaxInFlightBatches int
	// MaxInFlightBytes is about the number of bytes without a receipt at which Send waits; default 16 MiB.
	MaxInFlightBytes int
	// DeliveryTimeout: a batch without a receipt for this time ends the producer with OUTCOME_UNKNOWN; default two
	// minutes. Negative: no limit.
	DeliveryTimeout time.Duration
}

const defaultDeliveryTimeout = 2 * time.Minute

func (o *ProducerOptions) setDefaults() error {
	for _, one := range []struct {
		name          string
		value         *int
		usual, atMost int
	}{
		{"MaxBatchRows", &o.MaxBatchRows, 1000, maxBatchRows},
		{"MaxBatchBytes", &o.MaxBatchBytes, 128 << 10, maxBatchBytes},
		{"MaxInFlightBatches", &o.MaxInFlightBatches, 32, math.MaxInt},
		{"MaxInFlightBytes", &o.MaxInFlightBytes, 16 << 20, math.MaxInt},
	} {
		if *one.value == 0 {
			*one.value = one.usual
		}
		if *one.value < 0 || *one.value > one.atMost {
			return errorf("INVALID_REQUEST", "%s is %d: it should be 1 to %d", one.name, *one.value, one.atMost)
		}
	}
	o.MaxBatchBytes = min(o.MaxBatchBytes, maxBatchBytes-batchOverheadBytes)
	if o.Linger == 0 {
		o.Linger = time.Millisecond
	}
	if o.DeliveryTimeout == 0 {
		o.DeliveryTimeout = defaultDeliveryTimeout
	}
	return nil
}

// Producer publishes under a producer name. It is safe for concurrent use; then messages take their sequence IDs, and
// their places in the topic, in the order of the calls.
//
// After a broken connection or a restart of the sidecar, the producer sends messages without a receipt again, in order.
// Each message is in the log at most once. A message with a receipt is in the log exactly once, and durable.
//
// One of these errors ends the producer, and all messages without a receipt fail with it: [ErrFenced], another process
// has opened the name; [ErrDataLoss], the sidecar has lost acknowledged messages; [ErrInvalidRequest], the sidecar
// refuses a batch for its content (earlier batches still get receipts); [ErrOutcomeUnknown], no receipt arrived within
// the delivery timeout. After the last, open the producer again, and send from LastSequenceID + 1.
type Producer struct {
	client  *Client
	topic   string
	name    string
	options ProducerOptions
	ctx     context.Context
	cancel  context.CancelFunc
	started chan struct{} // closed when the session has started or failed
	ended   chan struct{}
	added   chan struct{} // something to send was added

	mu       sync.Mutex
	queue    queue
	filling  *entry // the batch that takes messages, if there is one
	sealing  *time.Timer
	lastSent int64 // in this session; -1 before
	lastID   int64
	room     chan struct{} // closed when there is room, if somebody waits
	seat     *seat         // while a stream serves the session
	route    *route
	delays   delays
	rewinds  *time.Timer
	isClosed bool
	// inTrouble: a call has failed or was refused since the last receipt.
	inTrouble bool
	// resumedInVain: the session was resumed after a refusal, and no receipt has arrived since.
	resumedInVain bool
}

// NewProducer opens a producer. It takes the name over from any other process, and waits until all messages in flight
// under that name are settled, for at most 30 seconds.
func (c *Client) NewProducer(ctx context.Context, topic, name string, options ProducerOptions) (*Producer, error) {
	full, err := topicName(topic)
	if err != nil {
		return nil, err
	}
	if len(name) == 0 || len(name) > maxNameBytes || !utf8.ValidString(name) {
		return nil, errorf("INVALID_NAME", "the producer name %.80q should be 1 to %d bytes of UTF-8", name, maxNameBytes)
	}
	if err := options.setDefaults(); err != nil {
		return nil, err
	}
	p := &Producer{
		client: c, topic: full, name: name, options: options,
		started: make(chan struct{}), ended: make(chan struct{}), added: make(chan struct{}, 1),
		queue: newQueue(name), lastSent: -1, lastID: -1,
		route: newRoute(&c.sidecars, full), delays: delays{longest: longestDelay},
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	go p.run()
	ctx, cancel := context.WithTimeout(ctx, openTimeout)
	defer cancel()
	select {
	case <-p.started:
	case <-ctx.Done():
	}
	p.mu.Lock()
	err = p.queue.failure
	if !p.queue.isOpen && err == nil {
		p.queue.failure = ended(ctx, "the producer was not opened in time")
		if err = p.queue.failure; p.queue.lastRefusal != nil {
			err = p.queue.lastRefusal
		}
	}
	p.lastID = p.queue.opened
	p.mu.Unlock()
	if err != nil {
		p.cancel()
		<-p.ended
		return nil, err
	}
	if options.DeliveryTimeout > 0 {
		go p.limitDelivery()
	}
	return p, nil
}

// LastSequenceID returns the highest sequence ID that was sent. Before the first message, it is the highest durable ID
// of the producer name, after which the source must continue; -1 if there is none.
func (p *Producer) LastSequenceID() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.lastID
}

// Send queues a message and returns its receipt. It waits only for room, until the context ends; then the message was
// not queued.
//
// The sequence ID must come from the source of the messages, and must rise; gaps are allowed. [NextSequenceID] numbers
// the messages. The producer copies the message. Errors of an invalid message change nothing.
func (p *Producer) Send(ctx context.Context, sequenceID int64, m Message) (Receipt, error) {
	size, err := m.size()
	if err != nil {
		return Receipt{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.waitForRoom(ctx); err != nil {
		return Receipt{}, err
	}
	id, err := p.nextID(p.lastSent, sequenceID)
	if err != nil {
		return Receipt{}, err
	}
	if p.filling != nil && p.filling.columns.size+size > p.options.MaxBatchBytes {
		p.seal()
	}
	if p.filling == nil {
		p.filling = newEntry()
		this := p.filling
		p.sealing = time.AfterFunc(p.options.Linger, func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.filling == this {
				p.seal()
			}
		})
		if p.queue.waiting == 0 {
			p.wake()
		}
	}
	receipt := Receipt{p.filling, p.filling.columns.rows()}
	p.filling.columns.ids = append(p.filling.columns.ids, id)
	p.filling.columns.add(&m, size)
	p.sent(id)
	if receipt.row+1 >= p.options.MaxBatchRows || p.filling.columns.size >= p.options.MaxBatchBytes {
		p.seal()
	}
	return receipt, nil
}

// SendBatch queues a whole batch of at most 65,536 messages and 8 MiB, after all earlier messages. It is faster than
// Send. Without sequenceIDs, it numbers the messages. Otherwise it is the same as [Producer.Send].
func (p *Producer) SendBatch(ctx context.Context, sequenceIDs []int64, messages []Message) (BatchReceipt, error) {
	if rows := len(messages); rows == 0 || rows > maxBatchRows || (sequenceIDs != nil && len(sequenceIDs) != rows) {
		return BatchReceipt{}, errorf("INVALID_BATCH", "a batch of %d messages and %d sequence IDs: it should have 1 to %d",
			rows, len(sequenceIDs), maxBatchRows)
	}
	e := newEntry()
	e.columns.reserve(messages)
	for i := range messages {
		size, err := messages[i].size()
		if err != nil {
			return BatchReceipt{}, err
		}
		e.columns.add(&messages[i], size)
	}
	if e.columns.size+batchOverheadBytes > maxBatchBytes {
		return BatchReceipt{}, tooLarge(e.columns.size)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if err := p.waitForRoom(ctx); err != nil {
		return BatchReceipt{}, err
	}
	last, id := p.lastSent, int64(NextSequenceID)
	for i := range messages {
		if sequenceIDs != nil {
			id = sequenceIDs[i]
		}
		if id == NextSequenceID && i > 0 {
			id = max(p.lastID, last) + 1
		}
		next, err := p.nextID(last, id)
		if err != nil {
			return BatchReceipt{}, err
		}
		e.columns.ids = append(e.columns.ids, next)
		last, id = next, NextSequenceID
	}
	p.seal()
	p.sent(last)
	e.seal()
	p.queue.add(e)
	p.wake()
	return BatchReceipt{e}, nil
}

// Flush waits until all earlier messages have receipts. It returns the first failure, or the error of the context.
func (p *Producer) Flush(ctx context.Context) error {
	p.mu.Lock()
	p.seal()
	waiting := append([]*entry(nil), p.queue.entries...)
	err := p.queue.failure
	p.mu.Unlock()
	for _, e := range waiting {
		if err := e.wait(ctx); err != nil {
			return err
		}
	}
	return err
}

// Close flushes and ends the producer. If the context ends first, messages without a receipt fail with OUTCOME_UNKNOWN,
// and Close returns that error.
func (p *Producer) Close(ctx context.Context) error {
	p.mu.Lock()
	wasClosed := p.isClosed
	p.isClosed = true
	p.updateRoom()
	p.mu.Unlock()
	if wasClosed { // another call flushes, and returns the outcome
		select {
		case <-p.ended:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	err := p.Flush(ctx)
	p.cancel()
	<-p.ended
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.queue.entries) > 0 {
		err = p.queue.outcomeUnknown(fmt.Sprintf("producer %q was closed", p.name)).with(err)
		p.fail(err)
	}
	return err
}

func (p *Producer) nextID(last, sequenceID int64) (int64, error) {
	if sequenceID == NextSequenceID {
		sequenceID = p.lastID + 1
	}
	if sequenceID < 0 {
		return 0, errorf("INVALID_SEQUENCE_ID", "%d is not a sequence ID: they are 0 to 2^63 - 1", sequenceID)
	}
	if sequenceID <= last {
		return 0, errorf("NOT_ASCENDING", "sequence ID %d is not above %d, which was sent before", sequenceID, last)
	}
	return sequenceID, nil
}

func (p *Producer) sent(id int64) { p.lastSent, p.lastID = id, max(p.lastID, id) }

func (p *Producer) isFull() bool {
	bytes := p.queue.bytes
	if p.filling != nil {
		bytes += p.filling.columns.size
	}
	return p.queue.waiting >= p.options.MaxInFlightBatches || bytes >= p.options.MaxInFlightBytes
}

// waitForRoom waits until another message may be queued. It releases the lock meanwhile.
func (p *Producer) waitForRoom(ctx context.Context) error {
	for {
		if p.queue.failure != nil {
			return p.queue.failure
		}
		if p.isClosed {
			return errorf("INVALID_REQUEST", "producer %q is closed", p.name)
		}
		if !p.isFull() {
			return nil
		}
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
			return ctx.Err()
		}
	}
}

func (p *Producer) updateRoom() {
	if p.room != nil && (!p.isFull() || p.queue.failure != nil || p.isClosed) {
		close(p.room)
		p.room = nil
	}
}

// seal queues the batch that takes messages, if there is one.
func (p *Producer) seal() {
	if p.filling == nil {
		return
	}
	p.sealing.Stop()
	e := p.filling
	p.filling = nil
	e.seal()
	p.queue.add(e)
	p.wake()
}

// wake tells the stream, or the session that waits for something to send.
func (p *Producer) wake() {
	if p.seat != nil {
		p.seat.ready()
		return
	}
	select {
	case p.added <- struct{}{}:
	default:
	}
}

// fail ends all messages without a receipt, and the producer.
func (p *Producer) fail(err error) {
	p.queue.fail(err, nil)
	p.seal()
	p.updateRoom()
}

// limitDelivery ends the producer when the oldest batch has waited for too long: later messages must not overtake
// messages that were given up.
func (p *Producer) limitDelivery() {
	timeout := p.options.DeliveryTimeout
	for {
		p.mu.Lock()
		left := timeout
		if len(p.queue.entries) > 0 {
			left = timeout - time.Since(p.queue.entries[0].queuedAt)
		}
		if left <= 0 {
			p.fail(p.queue.outcomeUnknown(fmt.Sprintf("no receipt within %v", timeout)))
			p.mu.Unlock()
			p.cancel()
			return
		}
		p.mu.Unlock()
		due := time.Now().Add(left + time.Millisecond)
		if sleep(p.ctx, time.Until(due)) != nil {
			return
		}
		// While this process was stopped, it could receive nothing: the same time again.
		if late := time.Since(due); late > time.Second && sleep(p.ctx, min(late, timeout)) != nil {
			return
		}
	}
}

// run connects again and again, until the producer ends.
func (p *Producer) run() {
	defer close(p.ended)
	defer p.cancel() // also ends limitDelivery
	for {
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

// after handles the end of a connection. It returns whether the session goes on, and after which delay.
func (p *Producer) after(err error) (bool, time.Duration) {
	p.mu.Lock()
	e := p.route.doubted(asError(err, p.route.address))
	isStarting := !p.queue.isOpen
	p.inTrouble = true
	if p.queue.failure != nil && len(p.queue.entries) == 0 {
		p.mu.Unlock()
		return false, 0
	}
	if !e.isTemporary() {
		defer p.mu.Unlock()
		if e.Reason == "INVALID_EPOCH" { // of a frame, not of Open: the session resumes
			return true, 0
		}
		if errors.Is(e, ErrAccessDenied) && p.queue.waiting > 0 {
			p.queue.lastRefusal = e
			e = p.queue.outcomeUnknown(fmt.Sprintf("producer %q may not go on", p.name))
		}
		p.fail(e)
		if isStarting {
			close(p.started)
		}
		return false, 0
	}
	if e.Reason == "STREAM_IDLE" && len(p.queue.entries) == 0 && p.filling == nil {
		p.mu.Unlock()
		select { // the session stays, and resumes when there is something to send
		case <-p.added:
		case <-p.ctx.Done():
		}
		return true, 0
	}
	defer p.mu.Unlock()
	movesOn := p.route.movesOn(e)
	p.queue.lastRefusal = e
	if isStarting && e.Reason == "NOT_A_SIDECAR" && !movesOn {
		p.fail(e)
		close(p.started)
		return false, 0
	}
	if movesOn {
		return true, 0
	}
	return true, max(p.delays.next(), e.RetryDelay)
}

// connect opens or resumes the session. Then it sends frames and handles answers until the stream ends.
func (p *Producer) connect() error {
	p.mu.Lock()
	address, isResume := p.route.address, p.queue.isOpen
	request := &pb.OpenRequest{Topic: p.topic, ProducerNames: []string{p.name}}
	if isResume {
		request.Epochs = []int64{p.queue.epoch}
	}
	p.mu.Unlock()
	answer, e := p.client.open(p.ctx, address, request)
	p.mu.Lock()
	isForgotten := false
	if e == nil {
		isForgotten = p.queue.isForgottenBy(answer)
		if _, e = p.route.checkTerm(answer.Term, p.queue.term); e == nil {
			e = p.queue.open(answer) // if the history was replaced, it returns the loss
		}
	} else if d := p.route.doubted(e); isResume && d == e && (e.Reason == "INVALID_EPOCH" || e.Reason == "TOPIC_NOT_FOUND") {
		e = errorf("DATA_LOSS", "the sidecar does not know the session that it has opened: %s", e.Message).with(e)
	}
	p.mu.Unlock()
	if e != nil {
		return e
	}
	if isForgotten { // without the lock: the handler may publish, too
		p.client.logger.Warn("The topic has forgotten the producer, which was unused for longer than its policy allows. "+
			"The producer continues as a new one: what it sends again is stored again.",
			"topic", p.topic, "producer", p.name, "persisted", answer.Persisted[0])
	}
	if !isResume {
		close(p.started)
	}
	err := p.client.attend(p.ctx, address, p.topic, p)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.rewinds != nil {
		p.rewinds.Stop()
		p.rewinds = nil
	}
	return err
}

// open starts or resumes the session of one name.
func (c *Client) open(ctx context.Context, address string, request *pb.OpenRequest) (*pb.OpenResponse, *Error) {
	var answer *pb.OpenResponse
	e := c.unary(ctx, address, func(ctx context.Context, conn *grpc.ClientConn, o ...grpc.CallOption) (proto.Message, error) {
		var err error
		answer, err = pb.NewPublishServiceClient(conn).Open(ctx, request, o...)
		return answer, err
	})
	if e != nil {
		return nil, e
	}
	if answer.Incarnation == 0 || len(answer.Epochs) != 1 || len(answer.Persisted) != 1 {
		return nil, errorf("NOT_A_SIDECAR", "the answer of %s does not open a session", address)
	}
	for _, r := range answer.Refusals {
		return nil, newError(r.Reason, never, r.Message, map[string]string{"current_epoch": fmt.Sprint(r.CurrentEpoch)})
	}
	return answer, nil
}

func (p *Producer) sit(s *seat) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.seat = s
}

// nextFrame is for the stream.
func (p *Producer) nextFrame(s *seat) (*pb.Frame, int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.seat != s { // the frame would get no answer
		return nil, 0
	}
	if p.queue.waiting == 0 {
		p.seal() // nothing is in flight: waiting for more messages would only delay these
	}
	return p.queue.nextFrame()
}

// take is for the stream.
func (p *Producer) take(s *seat, answer *pb.PublishStreamResponse, receipts []*pb.Receipt, refusals []*pb.Refusal) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.seat != s {
		return nil
	}
	q := &p.queue
	if answer.Incarnation != q.incarnation {
		return errorf("DATA_LOSS", "the topic was recreated: its incarnation is %d, and was %d before",
			answer.Incarnation, q.incarnation)
	}
	if answer.Term < q.term {
		return p.route.formerOwner(answer.Term, q.term)
	}
	q.term, q.durableIndex = answer.Term, max(q.durableIndex, answer.DurableIndex)
	waiting := q.waiting
	for _, r := range receipts {
		if e := q.receipt(r); e != nil {
			return e
		}
	}
	if p.inTrouble && q.waiting < waiting {
		p.inTrouble, p.resumedInVain, q.lastRefusal, p.delays.last = false, false, nil, 0
		p.route.goesWell()
	}
	for _, r := range refusals {
		why := refusalError(r)
		p.inTrouble = true
		if !p.resumedInVain && q.asksForResume(r.Frame, why) {
			p.resumedInVain = true
			return why
		}
		q.refused(r.Frame, why)
		if why.Reason == "NOT_OWNER" || p.route.hasLasted(why) {
			return why // the session resumes at the owner
		}
	}
	p.updateRoom()
	if q.failure != nil && len(q.entries) == 0 {
		return q.failure
	}
	if q.mustRewind && len(q.unanswered) == 0 && p.rewinds == nil {
		p.inTrouble = true
		var this *time.Timer
		this = time.AfterFunc(max(p.delays.next(), q.retryDelay), func() {
			p.mu.Lock()
			defer p.mu.Unlock()
			if p.rewinds == this {
				p.rewinds = nil
				p.queue.rewind()
				p.wake()
			}
		})
		p.rewinds = this
	}
	return nil
}
