package seqdedupe

import (
	"maps"
	"slices"
	"time"
	"unicode/utf8"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

// Message is a message to publish.
type Message struct {
	// Payload is at most 5 MiB long; nil means that the message has no payload.
	Payload []byte
	// Key is any bytes; nil means that the message has no key.
	Key []byte
	// EventTime is kept in milliseconds; the zero time means none.
	EventTime time.Time
	// Properties are valid UTF-8.
	Properties map[string]string
}

const (
	maxBatchBytes   = 8 << 20
	maxBatchRows    = 65_536
	maxPayloadBytes = 5 << 20

	// Upper bounds of what the encoding adds.
	batchOverheadBytes    = 1024
	rowOverheadBytes      = 48
	propertyOverheadBytes = 8
)

// size returns an upper bound of the message's encoded size. Errors: MESSAGE_TOO_LARGE, BATCH_TOO_LARGE, INVALID_REQUEST.
func (m *Message) size() (int, error) {
	size := len(m.Payload) + len(m.Key) + rowOverheadBytes
	for name, value := range m.Properties {
		if !utf8.ValidString(name) || !utf8.ValidString(value) {
			return 0, errorf("INVALID_REQUEST", "the property %q is not valid UTF-8", name)
		}
		size += len(name) + len(value) + propertyOverheadBytes
	}
	if len(m.Payload) > maxPayloadBytes {
		return 0, errorf("MESSAGE_TOO_LARGE", "a payload of %d bytes: at most %d are taken", len(m.Payload), maxPayloadBytes)
	}
	if size+batchOverheadBytes > maxBatchBytes {
		return 0, tooLarge(size)
	}
	return size, nil
}

func tooLarge(size int) error {
	return errorf("BATCH_TOO_LARGE", "a batch of up to %d bytes: at most %d are taken", size+batchOverheadBytes, maxBatchBytes)
}

// A blobs is a column of values that may be absent, in Arrow's layout.
type blobs struct {
	offsets []int32
	data    []byte
	valid   []byte
	present int
}

func (b *blobs) add(value []byte) {
	row := len(b.offsets)
	if row%8 == 0 {
		b.valid = append(b.valid, 0)
	}
	if value != nil {
		b.valid[row/8] |= 1 << (row % 8)
		b.present++
	}
	b.data = append(b.data, value...)
	b.offsets = append(b.offsets, int32(len(b.data)))
}

// encoded returns the offsets, beginning with 0, and the validity, which is omitted if all values are present.
func (b *blobs) encoded() (offsets []int32, valid []byte) {
	if b.present < len(b.offsets) {
		valid = b.valid
	}
	return slices.Insert(b.offsets, 0, 0), valid
}

// columns are the messages of a batch. They do not change after the batch is sealed.
type columns struct {
	ids             []int64
	deduplication   blobs
	payloads, keys  blobs
	eventTimes      []int64
	hasEventTime    bool
	propertyOffsets []int32
	names, values   blobs
	size            int
}

func (c *columns) rows() int { return len(c.payloads.offsets) }

// reserve makes room for these messages.
func (c *columns) reserve(messages []Message) {
	bytes, rows := 0, len(messages)
	for i := range messages {
		bytes += len(messages[i].Payload)
	}
	c.payloads.data, c.payloads.offsets = make([]byte, 0, bytes), make([]int32, 0, rows+1)
	c.ids, c.eventTimes = make([]int64, 0, rows), make([]int64, 0, rows)
	c.keys.offsets, c.propertyOffsets = make([]int32, 0, rows+1), make([]int32, 0, rows+1)
}

// add appends a checked message of this size.
func (c *columns) add(m *Message, size int) {
	c.size += size
	c.payloads.add(m.Payload)
	c.keys.add(m.Key)
	eventTime := int64(0)
	if !m.EventTime.IsZero() {
		eventTime, c.hasEventTime = m.EventTime.UnixMilli(), true
	}
	c.eventTimes = append(c.eventTimes, eventTime)
	if len(m.Properties) > 0 {
		for _, name := range slices.Sorted(maps.Keys(m.Properties)) {
			c.names.add([]byte(name))
			c.values.add([]byte(m.Properties[name]))
		}
	}
	c.propertyOffsets = append(c.propertyOffsets, int32(len(c.names.offsets)))
}

// batch returns the columns in the form of the contract, without those of the producer. It is called once.
func (c *columns) batch() *pb.Batch {
	b := &pb.Batch{SequenceIds: c.ids, Payloads: c.payloads.data}
	b.PayloadOffsets, b.PayloadValidity = c.payloads.encoded()
	if c.hasEventTime {
		b.EventTimesMs = c.eventTimes
	}
	if c.keys.present > 0 {
		b.Keys = c.keys.data
		b.KeyOffsets, b.KeyValidity = c.keys.encoded()
	}
	if len(c.names.offsets) > 0 {
		b.PropertyOffsets = slices.Insert(c.propertyOffsets, 0, 0)
		b.PropertyNames, b.PropertyValues = c.names.data, c.values.data
		b.PropertyNameOffsets, _ = c.names.encoded()
		b.PropertyValueOffsets, _ = c.values.encoded()
	}
	if len(c.deduplication.offsets) > 0 {
		b.DeduplicationIds = c.deduplication.data
		b.DeduplicationIdOffsets, _ = c.deduplication.encoded()
	}
	return b
}

// withProducer returns the batch in a session, without copying the messages. Each frame needs a separate one: the stream
// may still be encoding an earlier frame.
func withProducer(b *pb.Batch, name string, epoch, link int64) *pb.Batch {
	return &pb.Batch{
		ProducerNameOffsets:  []int32{0, int32(len(name))},
		ProducerNames:        []byte(name),
		Epochs:               []int64{epoch},
		PreviousSequenceIds:  []int64{link},
		SequenceIds:          b.SequenceIds,
		EventTimesMs:         b.EventTimesMs,
		KeyOffsets:           b.KeyOffsets,
		KeyValidity:          b.KeyValidity,
		Keys:                 b.Keys,
		PropertyOffsets:      b.PropertyOffsets,
		PropertyNameOffsets:  b.PropertyNameOffsets,
		PropertyNames:        b.PropertyNames,
		PropertyValueOffsets: b.PropertyValueOffsets,
		PropertyValues:       b.PropertyValues,
		PayloadOffsets:       b.PayloadOffsets,
		PayloadValidity:      b.PayloadValidity,
		Payloads:             b.Payloads,
	}
}
