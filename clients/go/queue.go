package seqdedupe

import (
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

// frameNumbers are unique in the process, as the contract requires.
var frameNumbers atomic.Uint64

// A queue has the batches of a producer that wait for their receipts, oldest first, and fulfils the client's duties
// (publish.proto) without any I/O. A batch is always sent again as a whole: rows that already have a receipt are then
// answered DUP, which changes nothing. The producer's lock guards the queue.
//
// After a refusal or an UNKNOWN, the queue sends nothing (mustRewind) until all frames in flight are answered. After the
// delay, rewind restarts from the oldest batch without a receipt.
type queue struct {
	name       string
	entries    []*entry
	sent       int // the number of entries from the front that were sent since the last rewind
	unanswered map[uint64]*entry
	waiting    int // the number of entries without a receipt
	bytes      int

	mustRewind  bool
	retryDelay  time.Duration // with mustRewind: the longest delay that a refusal asked for
	lastRefusal *Error        // why nothing has become durable lately
	failure     error         // after it, the queue accepts no more batches

	isOpen         bool
	incarnation    int64
	term           int64 // the highest of any answer
	durableIndex   int64 // the highest of any answer: below it, the topic's log is durable
	epoch          int64
	opened         int64 // the persisted ID in the last answer to Open
	lastQueued     int64
	highestSent    int64
	highestReceipt int64
	settledUpTo    int64
}

func newQueue(name string) queue {
	return queue{
		name: name, unanswered: map[uint64]*entry{},
		opened: -1, lastQueued: -1, highestSent: -1, highestReceipt: -1, settledUpTo: -1,
	}
}

// durableID is the ID up to which everything sent is durable.
func (q *queue) durableID() int64 { return max(q.opened, q.settledUpTo) }

// add queues a sealed batch, whose IDs are above those of all earlier batches.
func (q *queue) add(e *entry) {
	if q.failure != nil {
		e.end(q.failure)
		return
	}
	e.link = q.linkOf(e)
	q.lastQueued = e.last()
	q.entries = append(q.entries, e)
	q.bytes += e.size
	q.waiting++
	e.queuedAt = time.Now()
}

func (q *queue) linkOf(e *entry) int64 {
	if q.lastQueued < q.opened && q.opened < e.first() {
		return q.opened
	}
	return q.lastQueued
}

// isForgottenBy reports whether this answer to Open is the first one that says that the topic has forgotten the name.
func (q *queue) isForgottenBy(answer *pb.OpenResponse) bool {
	return len(answer.Forgotten) > 0 && max(q.opened, q.highestReceipt) > answer.Persisted[0]
}

// open handles an answer to Open, which has started or resumed the session. Frames of the old stream are no longer in
// flight. It returns an error if the session cannot go on.
func (q *queue) open(answer *pb.OpenResponse) *Error {
	epoch, persisted := answer.Epochs[0], answer.Persisted[0]
	if q.isForgottenBy(answer) {
		q.opened, q.highestReceipt, q.lastQueued = persisted, -1, -1
		for _, e := range q.entries {
			if !e.settled {
				e.link = q.linkOf(e)
				q.lastQueued = e.last()
			}
		}
	}
	if q.isOpen {
		if e := q.checkResumed(answer, persisted); e != nil {
			return e
		}
	}
	q.durableIndex = max(q.durableIndex, answer.GetDurableIndex())
	q.isOpen, q.incarnation, q.term, q.epoch, q.opened = true, answer.Incarnation, answer.Term, epoch, persisted
	clear(q.unanswered)
	q.rewind()
	return nil
}

func (q *queue) checkResumed(answer *pb.OpenResponse, persisted int64) *Error {
	floor, durable := max(q.opened, q.highestReceipt), q.durableIndex
	if answer.DurableIndex != nil { // earlier versions omit it
		durable = *answer.DurableIndex
	}
	// If the topic has forgotten the name, only the durable index shows that messages with receipts are gone.
	isOlder := answer.Term < q.term || persisted < floor || durable < q.durableIndex
	if answer.Incarnation != q.incarnation || isOlder {
		return errorf("DATA_LOSS", "the sidecar answers with an older state than before, or with the state of another topic: "+
			"persisted sequence ID %d (at least %d before), term %d (%d before), incarnation %d (%d before), "+
			"durable index %d (%d before)",
			persisted, floor, answer.Term, q.term, answer.Incarnation, q.incarnation, durable, q.durableIndex)
	}
	if sent := max(q.opened, q.highestSent); persisted > sent {
		return errorf("FENCED", "another process has published under this name: sequence ID %d is persisted, "+
			"this one has sent none above %d", persisted, sent)
	}
	return nil
}

// nextFrame returns the next frame to send and its size, or nil.
func (q *queue) nextFrame() (*pb.Frame, int) {
	for !q.mustRewind && q.sent < len(q.entries) {
		e := q.entries[q.sent]
		q.sent++
		if e.settled {
			continue
		}
		number := frameNumbers.Add(1)
		q.unanswered[number] = e
		q.highestSent = max(q.highestSent, e.last())
		return &pb.Frame{Number: number, Batch: withProducer(e.batch, q.name, q.epoch, e.link)}, e.size
	}
	return nil, 0
}

// rewind sends again from the oldest batch without a receipt.
func (q *queue) rewind() { q.sent, q.mustRewind, q.retryDelay = 0, false, 0 }

// receipt handles a receipt. That of a frame that is not in flight changes nothing.
func (q *queue) receipt(r *pb.Receipt) *Error {
	e := q.unanswered[r.Frame]
	if e == nil {
		return nil
	}
	if !fits(r, e.rows) {
		return errorf("NOT_A_SIDECAR", "a receipt does not fit its frame, which has %d rows", e.rows)
	}
	delete(q.unanswered, r.Frame)
	if e.settled {
		return nil
	}
	last, all := e.record(r)
	if last >= 0 {
		q.highestReceipt = max(q.highestReceipt, e.ids[last])
	}
	if !all {
		q.mustRewind = true
		return nil
	}
	q.waiting--
	e.end(nil)
	q.release()
	return nil
}

// release drops the settled batches at the front.
func (q *queue) release() {
	for len(q.entries) > 0 && q.entries[0].settled {
		e := q.entries[0]
		q.entries[0] = nil
		q.entries = q.entries[1:]
		q.bytes -= e.size
		q.sent = max(0, q.sent-1)
		if e.err == nil {
			q.settledUpTo = e.last()
		}
	}
}

// asksForResume reports whether a refusal may mean that the topic has forgotten the producer: only a resume shows it.
func (q *queue) asksForResume(frame uint64, refusal *Error) bool {
	e := q.unanswered[frame]
	if e == nil || e.settled {
		return false
	}
	if refusal.Reason == "PREDECESSOR_MISSING" {
		oldest := slices.IndexFunc(q.entries, func(e *entry) bool { return !e.settled })
		return e == q.entries[oldest]
	}
	return refusal.Reason == "INVALID_EPOCH"
}

// refused handles a refusal. If sending again cannot help, this batch and all later batches fail.
func (q *queue) refused(frame uint64, refusal *Error) {
	e := q.unanswered[frame]
	delete(q.unanswered, frame)
	if e == nil || e.settled {
		return
	}
	if !refusal.isTemporary() {
		q.fail(refusal, e)
		return
	}
	q.mustRewind = true
	q.retryDelay = max(q.retryDelay, refusal.RetryDelay)
	if refusal.Reason != "PREDECESSOR_MISSING" { // it only follows from another refusal
		q.lastRefusal = refusal
	}
}

// fail ends the batches from this one on (nil: all), and all batches that are added later.
func (q *queue) fail(failure error, from *entry) {
	if q.failure == nil {
		q.failure = failure
	}
	begin := max(slices.Index(q.entries, from), 0)
	for _, e := range q.entries[begin:] {
		if !e.settled {
			q.waiting--
			e.end(failure)
		}
	}
	for number, e := range q.unanswered {
		if e.settled {
			delete(q.unanswered, number)
		}
	}
	q.release()
}

// outcomeUnknown returns the error of batches that are given up.
func (q *queue) outcomeUnknown(what string) *Error {
	if q.lastRefusal != nil {
		what += ": " + q.lastRefusal.Error()
	}
	e := errorf("OUTCOME_UNKNOWN", "%s; everything up to sequence ID %d is durable", what, q.durableID())
	e.Details = map[string]string{"durable_sequence_id": fmt.Sprint(q.durableID())}
	if q.lastRefusal != nil {
		e.Details["last_refusal"] = q.lastRefusal.Reason
		return e.with(q.lastRefusal)
	}
	return e
}
