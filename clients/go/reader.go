package seqdedupe

import (
	"context"
	"errors"
	"io"
	"iter"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

const (
	// missedAnswers: the connection counts as broken after the sidecar has omitted this number of heartbeats.
	missedAnswers = 2
	// maxMisfits is the number of streams in a row whose answers do not follow the messages read so far.
	maxMisfits = 5
)

// Start is where a reader starts. The zero value is [Earliest].
type Start struct {
	latest bool
	index  int64
	after  *Position
	by     startBy
}

type startBy int

const (
	startEarliest startBy = iota
	startLatest
	startIndex
	startAfter
)

// Earliest starts at the first message that is still stored.
func Earliest() Start { return Start{} }

// Latest starts at the first message that is published after the reader has connected.
func Latest() Start { return Start{by: startLatest} }

// AtIndex starts at an index.
func AtIndex(index int64) Start { return Start{by: startIndex, index: index} }

// After starts after a position.
func After(position Position) Start { return Start{by: startAfter, after: &position} }

// IndexRange is a range of consecutive indexes, from First to before Next.
type IndexRange struct{ First, Next int64 }

// ReaderOptions configures a [Reader]. The zero value reads everything that exists when the reader connects.
type ReaderOptions struct {
	// Start is where to start.
	Start Start
	// Follow: the reader never ends, and waits for new messages.
	Follow bool
	// StopIndex, if above 0, is the index before which the reader ends. It waits for messages that do not exist yet.
	StopIndex int64
	// SkipDamaged: the reader skips messages that are damaged on the sidecar's disk, see [Reader.Skipped].
	SkipDamaged bool
	// Cursor keeps the reader's position. If it has one, the reader starts after it.
	Cursor Cursor
}

// ReceivedMessage is a message that was read.
type ReceivedMessage struct {
	Message
	// Index is the index of the message in the topic.
	Index int64
	// MessageID is the place of the message in the log.
	MessageID MessageID
	// ProducerName and SequenceID identify the message. With a deduplication ID, they are empty and -1.
	ProducerName string
	SequenceID   int64
	// DeduplicationID is nil in a topic of sequence IDs.
	DeduplicationID []byte
	// PublishTime is when the log took the message, by the sidecar's clock.
	PublishTime time.Time
	// Position is the position after this message.
	Position Position
}

// Reader reads a topic: durable messages, in order, without gaps or repetitions. After a lost connection, or while the
// topic recovers, it waits without a limit other than the context, and then continues. It is not safe for concurrent use.
type Reader struct {
	client   *Client
	topic    string
	options  ReaderOptions
	route    *route
	delays   delays
	position *Position // of the last message returned, or the start position

	cursor      *cursorMoves
	knowsCursor bool
	incarnation int64 // 0: unknown
	next        int64 // the index of the next message to receive; -1: unknown
	after       *Position
	stop        int64 // -1: none, or unknown yet
	skipped     []IndexRange
	messages    []ReceivedMessage // received, not yet returned
	records     []*pb.Record      // received, not yet decoded
	conn        *connection
	cancel      context.CancelFunc
	answers     chan readAnswer
	silence     time.Duration // the stream counts as broken after this time; 0: no limit
	misfits     []*Error
	hasAnswered bool
	isClosed    bool
}

type readAnswer struct {
	response *pb.ReadStreamResponse
	err      error
}

// NewReader returns a reader. It connects at the first read.
func (c *Client) NewReader(topic string, options ReaderOptions) (*Reader, error) {
	full, err := topicName(topic)
	if err != nil {
		return nil, err
	}
	start := options.Start
	if options.Follow && options.StopIndex > 0 {
		return nil, errorf("INVALID_REQUEST", "a reader that follows has no StopIndex")
	}
	if options.StopIndex < 0 || (start.by == startIndex && start.index < 0) || (start.after != nil && !start.after.isWhole()) {
		return nil, errorf("INVALID_POSITION", "an index is counted from 0, and the parts of a position fit together")
	}
	r := &Reader{
		client: c, topic: full, options: options, route: newRoute(&c.sidecars, full),
		delays: delays{longest: longestDelay}, next: -1, stop: -1, knowsCursor: options.Cursor == nil,
	}
	if options.Cursor != nil {
		r.cursor = &cursorMoves{cursor: options.Cursor}
	}
	if options.StopIndex > 0 {
		r.stop = options.StopIndex
	}
	switch start.by {
	case startIndex:
		r.next = start.index
	case startAfter:
		r.readOnAfter(*start.after)
		r.position = start.after
	}
	return r, nil
}

// Next returns the next message. It returns [io.EOF] at the end, and the error of the context if that ends first; a
// later call then continues. Errors: [ErrPosition], [ErrNotFound], [ErrAccessDenied], [ErrDataLoss].
func (r *Reader) Next(ctx context.Context) (*ReceivedMessage, error) {
	if len(r.messages) == 0 {
		if err := r.fetch(ctx); err != nil {
			return nil, err
		}
	}
	m := &r.messages[0]
	r.messages = r.messages[1:]
	r.position = &m.Position
	return m, nil
}

// NextBatch returns the next messages, at least one, without waiting for more than one batch. Otherwise it is the same as
// [Reader.Next].
func (r *Reader) NextBatch(ctx context.Context) ([]ReceivedMessage, error) {
	if len(r.messages) == 0 {
		if err := r.fetch(ctx); err != nil {
			return nil, err
		}
	}
	all := r.messages
	r.messages = nil
	r.position = &all[len(all)-1].Position
	return all, nil
}

// All returns an iterator over the messages. It ends at the end, or with an error.
func (r *Reader) All(ctx context.Context) iter.Seq2[*ReceivedMessage, error] {
	return func(yield func(*ReceivedMessage, error) bool) {
		for {
			m, err := r.Next(ctx)
			if err == io.EOF || !yield(m, err) || err != nil {
				return
			}
		}
	}
}

// Position returns the position of the last message returned. Before the first message, it is the start position, or nil
// while that is unknown.
func (r *Reader) Position() *Position { return r.position }

// Skipped returns the indexes that were skipped, in order, with SkipDamaged.
func (r *Reader) Skipped() []IndexRange { return r.skipped }

// SavePosition moves the reader's cursor to Position. Call it when the effects of all messages returned so far are
// complete: after a crash, the reader returns the messages after the cursor again. It returns CURSOR_MOVED ([ErrFenced])
// if another process has moved the cursor. After OUTCOME_UNKNOWN, call it again.
func (r *Reader) SavePosition(ctx context.Context) error {
	if r.cursor == nil {
		return errorf("INVALID_REQUEST", "this reader of %s was given no cursor", r.topic)
	}
	if r.position == nil || !r.knowsCursor || (r.cursor.kept != nil && r.cursor.kept.Position.Equal(*r.position)) {
		return nil
	}
	return r.cursor.move(ctx, CursorValue{Position: *r.position})
}

// Close ends the reader.
func (r *Reader) Close() error {
	r.isClosed = true
	r.messages = nil
	r.disconnect()
	return nil
}

func (r *Reader) readOnAfter(p Position) {
	r.after, r.incarnation, r.next = &p, p.Incarnation, p.Index+1
}

func (r *Reader) disconnect() {
	if r.conn != nil {
		r.cancel()
		r.conn.Close()
	}
	r.conn, r.answers, r.records, r.silence = nil, nil, nil, 0
}

func (r *Reader) isAtStop() bool { return r.stop >= 0 && max(r.next, 0) >= r.stop }

// fetch receives until there are messages.
func (r *Reader) fetch(ctx context.Context) error {
	if !r.knowsCursor {
		kept, err := r.cursor.read(ctx)
		if err != nil {
			return err
		}
		if kept != nil {
			r.readOnAfter(kept.Position)
			r.position = &kept.Position
		}
		r.knowsCursor = true
	}
	for {
		if r.isClosed {
			return io.EOF
		}
		err := r.receive(ctx)
		switch {
		case err == nil && len(r.messages) > 0:
			return nil
		case err == nil:
			continue
		case err == io.EOF:
			r.disconnect()
			return err
		case err == errCallEnded:
			return ctx.Err()
		case ctx.Err() != nil:
			r.disconnect()
			return ctx.Err()
		}
		conn := r.conn
		said := asError(err, r.route.address)
		if conn != nil {
			said = conn.err(err)
		}
		r.disconnect()
		if said.cause == errMisfit {
			if r.misfits = append(r.misfits, said); len(r.misfits) > maxMisfits {
				first := r.misfits[0]
				r.misfits = nil
				return first
			}
			if err := sleep(ctx, firstDelay<<len(r.misfits)); err != nil {
				return err
			}
			continue
		}
		e := r.route.doubted(said)
		if !e.isTemporary() {
			return e
		}
		movesOn := r.route.movesOn(e)
		if e.Reason == "NOT_A_SIDECAR" && !movesOn && !r.hasAnswered {
			return e
		}
		if !movesOn {
			if err := sleep(ctx, max(r.delays.next(), e.RetryDelay)); err != nil {
				return err
			}
		}
	}
}

// errMisfit is the cause of errors that an answer on a stream contradicts earlier answers.
var errMisfit = errors.New("the answer does not follow earlier answers")

// errCallEnded: the caller's context has ended. The stream goes on, and a later call continues.
var errCallEnded = errors.New("the context has ended")

// receive takes the next record in hand, or the next answer. It returns io.EOF at the end.
func (r *Reader) receive(ctx context.Context) error {
	if len(r.records) > 0 {
		record := r.records[0]
		r.records = r.records[1:]
		return r.decode(record)
	}
	if r.answers == nil {
		if err := r.connect(ctx); err != nil {
			return err
		}
	}
	var silent <-chan time.Time
	if r.silence > 0 {
		timer := time.NewTimer(r.silence)
		defer timer.Stop()
		silent = timer.C
	}
	var answer readAnswer
	select {
	case answer = <-r.answers:
	case <-silent:
		return errorf("UNREACHABLE", "the sidecar at %s was silent for %v", r.route.address, r.silence)
	case <-ctx.Done():
		return errCallEnded
	}
	if answer.err == io.EOF {
		if r.isAtStop() {
			return io.EOF
		}
		return errorf("UNREACHABLE", "the sidecar at %s ended the stream before its end", r.route.address)
	}
	if answer.err != nil {
		return answer.err
	}
	r.hasAnswered = true
	if answer.response == nil {
		r.silence = 0
		return nil
	}
	return r.take(answer.response)
}

func (r *Reader) take(answer *pb.ReadStreamResponse) error {
	if answer.Incarnation == 0 {
		return errorf("NOT_A_SIDECAR", "%s sent an answer without an incarnation", r.route.address)
	}
	if answer.AliveMs > 0 {
		r.silence = missedAnswers * time.Duration(answer.AliveMs) * time.Millisecond
	}
	if e := r.checkIncarnation(answer.Incarnation); e != nil {
		return e.with(errMisfit)
	}
	if s := answer.Skipped; s != nil {
		expected := s.FirstIndex
		if r.next >= 0 {
			expected = r.next
		}
		if s.FirstIndex > expected {
			return r.notTheNext(s.FirstIndex)
		}
		if expected < s.NextIndex {
			r.skipped = append(r.skipped, IndexRange{expected, s.NextIndex})
			r.next, r.misfits = s.NextIndex, nil
		}
		r.goesWell()
	}
	for _, record := range answer.Records {
		if record.GetBatch() != nil {
			r.records = append(r.records, record)
		}
	}
	if len(r.records) > 0 {
		r.goesWell()
	}
	return nil
}

func (r *Reader) goesWell() {
	r.delays.last = 0
	r.route.goesWell()
}

func (r *Reader) notTheNext(index int64) *Error {
	return errorf("ANSWERS_INCONSISTENT", "index %d of %s came, and %d was to come", index, r.topic, r.next).with(errMisfit)
}

func (r *Reader) checkIncarnation(incarnation int64) *Error {
	if r.incarnation != 0 && incarnation != r.incarnation {
		return errorf("POSITION_OF_ANOTHER_INCARNATION", "%s is the incarnation %d, and the position is of %d: the topic was "+
			"deleted and created again, or the position is of another topic", r.topic, incarnation, r.incarnation)
	}
	r.incarnation = incarnation
	return nil
}

// connect begins to read at the next index. It returns io.EOF if there is nothing to read.
func (r *Reader) connect(ctx context.Context) error {
	conn, err := r.client.dial(r.route.address)
	if err != nil {
		return err
	}
	r.conn = conn
	streamCtx, cancel := context.WithCancel(context.Background())
	r.cancel = cancel
	stopsAtEnd := r.options.StopIndex == 0 && !r.options.Follow
	if r.incarnation == 0 || (r.next < 0 && r.stop >= 0) || (stopsAtEnd && !r.isAtStop()) {
		if err := r.lookAtEnds(ctx, stopsAtEnd); err != nil {
			return err
		}
	}
	if r.isAtStop() {
		return io.EOF
	}
	request := &pb.ReadStreamRequest{Topic: r.topic, Start: r.start(), SkipDamaged: r.options.SkipDamaged, AliveMs: 30_000}
	if !r.client.sidecars.isOne() {
		request.AliveMs = 5_000
	}
	if r.stop >= 0 {
		request.End = &pb.ReadStreamRequest_StopIndex{StopIndex: r.stop}
	} else {
		request.End = &pb.ReadStreamRequest_Follow{Follow: true}
	}
	r.silence = callTimeout // until the sidecar has taken the stream
	answers := make(chan readAnswer, 1)
	r.answers = answers
	go func() {
		stream, err := pb.NewReadServiceClient(conn.ClientConn).ReadStream(streamCtx, request)
		begins := err == nil
		for {
			var answer readAnswer
			if answer.err = err; begins { // the metadata shows that the sidecar has taken the stream
				begins = false
				var header metadata.MD
				if header, answer.err = stream.Header(); header == nil && answer.err == nil {
					continue // the stream has failed: Recv returns why
				}
			} else if err == nil {
				answer.response, answer.err = stream.Recv()
			}
			select {
			case answers <- answer:
			case <-streamCtx.Done():
				return
			}
			if answer.err != nil {
				return
			}
		}
	}()
	return nil
}

// lookAtEnds determines the position of "latest" and the end of the topic once, so that they stay after a reconnect.
func (r *Reader) lookAtEnds(ctx context.Context, stopsAtEnd bool) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var answer *pb.GetLastMessageIdResponse
	err := answered(ctx, r.conn.ClientConn, func(ctx context.Context, conn *grpc.ClientConn, o ...grpc.CallOption) (proto.Message, error) {
		var err error
		answer, err = pb.NewReadServiceClient(conn).GetLastMessageId(ctx, &pb.GetLastMessageIdRequest{Topic: r.topic}, o...)
		return answer, err
	})
	if err != nil {
		return err
	}
	r.hasAnswered = true
	last := positionOf(answer.Last)
	if e := r.checkIncarnation(last.Incarnation); e != nil {
		return e
	}
	if r.options.Start.by == startLatest && r.after == nil {
		r.readOnAfter(last)
		r.position = &last
	}
	if r.next < 0 && r.stop >= 0 && r.stop <= answer.FirstIndex {
		r.next = answer.FirstIndex // retention has trimmed everything before the stop
	}
	if !stopsAtEnd {
		return nil
	}
	if r.stop > last.Index+1 {
		return errorf("POSITION_AFTER_END", "%s ended with index %d when this reader began, and ends with index %d now",
			r.topic, r.stop-1, last.Index)
	}
	if r.stop < 0 {
		r.stop = last.Index + 1
	}
	if r.next > r.stop {
		return errorf("POSITION_AFTER_END", "index %d is after the end of %s, whose next message gets index %d",
			r.next, r.topic, r.stop)
	}
	return nil
}

func (r *Reader) start() *pb.ReadStart {
	switch {
	// After skipped messages, the position before them would return them again.
	case r.after != nil && r.next == r.after.Index+1:
		return &pb.ReadStart{Start: &pb.ReadStart_After{After: r.after.proto()}}
	case r.next >= 0:
		return &pb.ReadStart{Start: &pb.ReadStart_Index{Index: r.next}}
	}
	return &pb.ReadStart{Start: &pb.ReadStart_Earliest{Earliest: true}}
}

// decode takes the messages of a record in hand, if it is the next one.
func (r *Reader) decode(record *pb.Record) error {
	if e := r.checkIncarnation(record.Incarnation); e != nil {
		return e.with(errMisfit)
	}
	messages, ok := messagesOf(record)
	if !ok || (r.next >= 0 && record.BaseIndex != r.next) {
		return r.notTheNext(record.BaseIndex)
	}
	r.messages, r.misfits = messages, nil
	r.readOnAfter(messages[len(messages)-1].Position)
	return nil
}

// messagesOf returns the messages of a record, if its columns fit together.
func messagesOf(record *pb.Record) ([]ReceivedMessage, bool) {
	b := record.GetBatch()
	rows := int(record.Rows)
	hasProducers := len(b.SequenceIds) > 0
	names, ok := values(b.ProducerNameOffsets, b.ProducerNames, nil, len(b.ProducerNameOffsets)-1)
	ok = ok && rows > 0 && rows <= maxBatchRows && len(b.PayloadOffsets) == rows+1
	ok = ok && (!hasProducers || (len(b.SequenceIds) == rows && len(names) > 0))
	ok = ok && (len(b.ProducerIndexes) == 0 || len(b.ProducerIndexes) == rows)
	ok = ok && (len(b.EventTimesMs) == 0 || len(b.EventTimesMs) == rows)
	payloads, fine := values(b.PayloadOffsets, b.Payloads, b.PayloadValidity, rows)
	ok = ok && fine
	keys, fine := values(b.KeyOffsets, b.Keys, b.KeyValidity, rows)
	ok = ok && fine
	ids, fine := values(b.DeduplicationIdOffsets, b.DeduplicationIds, nil, rows)
	ok = ok && fine && (hasProducers || len(ids) == rows)
	pairs := len(b.PropertyNameOffsets) - 1
	propertyNames, fine := values(b.PropertyNameOffsets, b.PropertyNames, nil, pairs)
	ok = ok && fine
	propertyValues, fine := values(b.PropertyValueOffsets, b.PropertyValues, nil, pairs)
	ok = ok && fine && (len(b.PropertyOffsets) == 0 || len(b.PropertyOffsets) == rows+1)
	runs := len(record.RunRows)
	ok = ok && len(record.RunLedgerIds) == runs && len(record.RunEntryIds) == runs && len(record.RunBatchIndexes) == runs
	if !ok {
		return nil, false
	}
	all := make([]ReceivedMessage, rows)
	run, step := 0, 0
	published := time.UnixMilli(record.PublishTimeMs)
	for row := range all {
		m := &all[row]
		m.Payload, m.Index, m.SequenceID, m.PublishTime = payloads[row], record.BaseIndex+int64(row), -1, published
		if keys != nil {
			m.Key = keys[row]
		}
		if len(b.EventTimesMs) > 0 && b.EventTimesMs[row] != 0 {
			m.EventTime = time.UnixMilli(b.EventTimesMs[row])
		}
		if ids != nil {
			m.DeduplicationID = ids[row]
		}
		if hasProducers {
			producer := 0
			if len(b.ProducerIndexes) > 0 {
				producer = int(b.ProducerIndexes[row])
			}
			if producer < 0 || producer >= len(names) {
				return nil, false
			}
			m.ProducerName, m.SequenceID = string(names[producer]), b.SequenceIds[row]
		}
		if len(b.PropertyOffsets) > 0 {
			first, next := int(b.PropertyOffsets[row]), int(b.PropertyOffsets[row+1])
			if first < 0 || next < first || next > pairs {
				return nil, false
			}
			if next > first {
				m.Properties = make(map[string]string, next-first)
			}
			for i := first; i < next; i++ {
				m.Properties[string(propertyNames[i])] = string(propertyValues[i])
			}
		}
		m.MessageID = MessageID{record.Incarnation, m.Index, -1}
		if runs > 0 {
			for run < runs && step == int(record.RunRows[run]) {
				run, step = run+1, 0
			}
			if run == runs {
				return nil, false
			}
			m.MessageID = MessageID{record.RunLedgerIds[run], record.RunEntryIds[run], record.RunBatchIndexes[run]}.later(step)
			step++
		}
		m.Position = Position{record.Incarnation, &m.MessageID, m.Index, record.Ownership}
	}
	return all, true
}

// values returns the values of a column in Arrow's layout: nil if the column is omitted, and false if it is malformed.
func values(offsets []int32, data, valid []byte, rows int) ([][]byte, bool) {
	if len(offsets) == 0 {
		return nil, len(data) == 0
	}
	if len(offsets) != rows+1 || offsets[0] != 0 || int(offsets[rows]) != len(data) ||
		(len(valid) != 0 && len(valid) != (rows+7)/8) {
		return nil, false
	}
	all := make([][]byte, rows)
	for row := range all {
		first, next := offsets[row], offsets[row+1]
		if next < first || int(next) > len(data) {
			return nil, false
		}
		if len(valid) == 0 || valid[row/8]>>(row%8)&1 == 1 {
			all[row] = data[first:next:next]
			if all[row] == nil { // an empty value is not an absent one
				all[row] = []byte{}
			}
		}
	}
	return all, true
}
