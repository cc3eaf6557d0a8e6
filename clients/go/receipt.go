package seqdedupe

import (
	"context"
	"time"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

// Verdict is the sidecar's decision about a message.
type Verdict int

const (
	// NotDup: the message is new, and is now in the log.
	NotDup Verdict = 1
	// Dup: the log already has a message with this ID. Nothing was appended.
	Dup Verdict = 2
)

// String returns NOT_DUP or DUP.
func (v Verdict) String() string { return map[Verdict]string{NotDup: "NOT_DUP", Dup: "DUP"}[v] }

// Published is the outcome of a message. The message is durable.
type Published struct {
	Verdict Verdict
	// SequenceID is that of the message; -1 for a message with a deduplication ID.
	SequenceID int64
	// Index is the index of the message in the topic. With Dup, it is that of the original. It is -1 if the sidecar no
	// longer knows the original; the log may then lack a message with exactly this ID.
	Index int64
	// MessageID is the ID of the message with this index.
	MessageID MessageID
	// IsImported means that a deduplication ID was part of an imported window. The message then has no index here.
	IsImported bool
}

var unknownID = MessageID{-1, -1, -1}

// outcome is what is known about the rows of a batch.
type outcome struct {
	ids  []int64 // of the rows; nil: of a batch with deduplication IDs
	rows int
	// If all rows were stored in one run: the first of them. Otherwise all rows, which have no verdict while undecided.
	firstIndex int64
	firstID    MessageID
	each       []Published
}

func (o *outcome) at(row int) Published {
	if o.each != nil {
		return o.each[row]
	}
	return Published{NotDup, o.id(row), o.firstIndex + int64(row), o.firstID.later(row), false}
}

func (o *outcome) id(row int) int64 {
	if o.ids == nil {
		return -1
	}
	return o.ids[row]
}

// fits reports whether a receipt can be that of a frame with this number of rows.
func fits(r *pb.Receipt, rows int) bool {
	known, runs := len(r.KnownRows), len(r.RunRows)
	ok := (len(r.Verdicts) == 0 || len(r.Verdicts) == rows) &&
		len(r.KnownIndexes) == known && len(r.KnownLedgerIds) == known && len(r.KnownEntryIds) == known &&
		(len(r.KnownBatchIndexes) == 0 || len(r.KnownBatchIndexes) == known) &&
		len(r.RunLedgerIds) == runs && len(r.RunEntryIds) == runs && len(r.RunBatchIndexes) == runs
	stored, inRuns := storedRows(r, rows), 0
	for _, verdict := range r.Verdicts {
		ok = ok && verdict >= pb.Verdict_VERDICT_NOT_DUP && verdict <= pb.Verdict_VERDICT_UNKNOWN
	}
	for _, row := range r.KnownRows {
		ok = ok && int(row) < rows
	}
	for _, row := range r.ImportedRows {
		ok = ok && int(row) < rows
	}
	for _, run := range r.RunRows {
		inRuns += int(run)
	}
	return ok && (stored == 0 || r.FirstIndex >= 0) && (runs == 0 || inRuns == stored)
}

// storedRows returns the number of rows that were new.
func storedRows(r *pb.Receipt, rows int) int {
	if len(r.Verdicts) == 0 {
		return rows
	}
	stored := 0
	for _, verdict := range r.Verdicts {
		if verdict == pb.Verdict_VERDICT_NOT_DUP {
			stored++
		}
	}
	return stored
}

// record adds a receipt that fits. Rows that already have a verdict keep it. It returns the last row with a verdict, or
// -1, and whether every row has one.
func (o *outcome) record(r *pb.Receipt) (last int, all bool) {
	if o.each == nil && len(r.Verdicts) == 0 && len(r.RunRows) == 0 {
		o.firstIndex, o.firstID = r.FirstIndex, messageID(r.FirstMessageId)
		return o.rows - 1, true
	}
	if o.each == nil {
		o.each = make([]Published, o.rows)
	}
	isNew := make([]bool, o.rows)
	run, step, index, id := 0, 0, r.FirstIndex, messageID(r.FirstMessageId)
	for row := range o.each {
		verdict := pb.Verdict_VERDICT_NOT_DUP
		if len(r.Verdicts) > 0 {
			verdict = r.Verdicts[row]
		}
		isNew[row] = o.each[row].Verdict == 0 && verdict != pb.Verdict_VERDICT_UNKNOWN
		published := Published{Verdict(verdict), o.id(row), -1, unknownID, false}
		if verdict == pb.Verdict_VERDICT_NOT_DUP {
			if len(r.RunRows) > 0 {
				for step == int(r.RunRows[run]) {
					run, step = run+1, 0
				}
				id = MessageID{r.RunLedgerIds[run], r.RunEntryIds[run], r.RunBatchIndexes[run]}
			}
			published.Index, published.MessageID = index, id.later(step)
			index, step = index+1, step+1
		}
		if isNew[row] {
			o.each[row] = published
		}
	}
	for i, row := range r.KnownRows {
		if p := &o.each[row]; isNew[row] && p.Verdict == Dup {
			p.Index, p.MessageID = r.KnownIndexes[i], MessageID{r.KnownLedgerIds[i], r.KnownEntryIds[i], -1}
			if len(r.KnownBatchIndexes) > 0 {
				p.MessageID.BatchIndex = r.KnownBatchIndexes[i]
			}
		}
	}
	for _, row := range r.ImportedRows {
		o.each[row].IsImported = true
	}
	last, all = -1, true
	for row := range o.each {
		if o.each[row].Verdict != 0 {
			last = row
		} else {
			all = false
		}
	}
	return last, all
}

// An entry is a batch of a producer, from its first message to its last receipt. The producer's lock guards it until
// done is closed.
type entry struct {
	outcome
	columns  columns
	batch    *pb.Batch // set when the batch is sealed, nil when it is settled
	link     int64     // the highest ID below the batch's first ID that this session sent or that Open returned
	size     int
	queuedAt time.Time
	err      error
	done     chan struct{}
	settled  bool
}

func newEntry() *entry { return &entry{done: make(chan struct{})} }

func (e *entry) first() int64 { return e.ids[0] }
func (e *entry) last() int64  { return e.ids[len(e.ids)-1] }

// seal ends the adding of messages.
func (e *entry) seal() {
	e.ids, e.rows, e.size, e.batch = e.columns.ids, e.columns.rows(), e.columns.size, e.columns.batch()
	e.columns = columns{}
}

// end settles the entry, with an error if it has failed.
func (e *entry) end(err error) {
	if !e.settled {
		e.err, e.batch, e.settled = err, nil, true
		close(e.done)
	}
}

func (e *entry) wait(ctx context.Context) error {
	select {
	case <-e.done:
		return e.err
	default:
	}
	select {
	case <-e.done:
		return e.err
	case <-ctx.Done():
		return ctx.Err()
	}
}

// Receipt is the future outcome of a message.
type Receipt struct {
	entry *entry
	row   int
}

// Done is closed when the outcome is known.
func (r Receipt) Done() <-chan struct{} { return r.entry.done }

// Wait waits for the outcome. It returns the error with which the message has failed, or the error of the context; then
// the message is still on its way.
func (r Receipt) Wait(ctx context.Context) (Published, error) {
	if err := r.entry.wait(ctx); err != nil {
		return Published{}, err
	}
	return r.entry.at(r.row), nil
}

// BatchReceipt is the future outcome of the messages of a batch.
type BatchReceipt struct{ entry *entry }

// Done is closed when the outcome is known.
func (r BatchReceipt) Done() <-chan struct{} { return r.entry.done }

// Wait waits for the outcome of all messages, in their order. See [Receipt.Wait].
func (r BatchReceipt) Wait(ctx context.Context) ([]Published, error) {
	if err := r.entry.wait(ctx); err != nil {
		return nil, err
	}
	all := make([]Published, r.entry.rows)
	for row := range all {
		all[row] = r.entry.at(row)
	}
	return all, nil
}
