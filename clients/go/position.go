package seqdedupe

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"google.golang.org/protobuf/proto"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

// MessageID is the place of a message in its log.
type MessageID struct {
	// LedgerID is the ledger. In the embedded log, it is the incarnation of the topic.
	LedgerID int64
	// EntryID is the entry in the ledger. In the embedded log, it is the index of the message.
	EntryID int64
	// BatchIndex is the place within an entry of several messages; -1 if the entry is one message.
	BatchIndex int32
}

// String returns ledger:entry or ledger:entry:batch_index.
func (id MessageID) String() string {
	if id.BatchIndex < 0 {
		return fmt.Sprintf("%d:%d", id.LedgerID, id.EntryID)
	}
	return fmt.Sprintf("%d:%d:%d", id.LedgerID, id.EntryID, id.BatchIndex)
}

// later returns the ID of the message that is this number of messages later in the same run.
func (id MessageID) later(rows int) MessageID {
	if id.BatchIndex < 0 {
		id.EntryID += int64(rows)
	} else {
		id.BatchIndex += int32(rows)
	}
	return id
}

func messageID(m *pb.MessageId) MessageID {
	return MessageID{m.GetLedgerId(), m.GetEntryId(), m.GetBatchIndex()}
}

// Position is the place of a reader: after the message with this index, in this incarnation of its topic. Store it in
// the same transaction as the messages' effects, as text ([Position.String], [ParsePosition]) or as bytes
// ([Position.MarshalBinary]). Positions of two incarnations have no order.
type Position struct {
	// Incarnation identifies the topic, also against a later topic of the same name.
	Incarnation int64
	// MessageID is the ID of the message; nil if unknown, or at the start of the topic.
	MessageID *MessageID
	// Index is the index of the message; -1 at the start of the topic.
	Index int64
	// Ownership identifies the history of the topic; 0 if unknown, or at the start of the topic.
	Ownership uint64
}

var positionText = regexp.MustCompile(
	`^(\d{1,19})(?:/(?:(start)|(\d{1,19}):(\d{1,19})(?::(\d{1,19}))?))?@(-1|\d{1,19})(?:#([0-9a-f]{16}))?$`)

// ParsePosition returns the position whose text [Position.String] has returned. The Python client uses the same text.
func ParsePosition(text string) (Position, error) {
	bad := errorf("INVALID_POSITION", "%.80q is not a position, such as 123/123:45@45 or 123@45", text)
	found := positionText.FindStringSubmatch(text)
	if found == nil {
		return Position{}, bad
	}
	var failed error
	number := func(text string, base, bits int) uint64 {
		n, err := strconv.ParseUint(text, base, bits)
		if err != nil {
			failed = err
		}
		return n
	}
	p := Position{Incarnation: int64(number(found[1], 10, 63)), Index: -1}
	if found[6] != "-1" {
		p.Index = int64(number(found[6], 10, 63))
	}
	if found[3] != "" {
		p.MessageID = &MessageID{int64(number(found[3], 10, 63)), int64(number(found[4], 10, 63)), -1}
		if found[5] != "" {
			p.MessageID.BatchIndex = int32(number(found[5], 10, 31))
		}
	}
	if found[7] != "" {
		p.Ownership = number(found[7], 16, 64)
	}
	if failed != nil || !p.isWhole() || (found[2] != "") != (p.Index < 0) {
		return Position{}, bad
	}
	return p, nil
}

// String returns the text that [ParsePosition] reads.
func (p Position) String() string {
	var text strings.Builder
	fmt.Fprintf(&text, "%d", p.Incarnation)
	if p.Index < 0 {
		text.WriteString("/start")
	} else if p.MessageID != nil {
		text.WriteString("/" + p.MessageID.String())
	}
	fmt.Fprintf(&text, "@%d", p.Index)
	if p.Ownership != 0 {
		fmt.Fprintf(&text, "#%016x", p.Ownership)
	}
	return text.String()
}

// MarshalBinary returns the position as an encoded protobuf message seqdedupe.v1.Position.
func (p Position) MarshalBinary() ([]byte, error) {
	return proto.MarshalOptions{Deterministic: true}.Marshal(p.proto())
}

// UnmarshalBinary reads what MarshalBinary has returned.
func (p *Position) UnmarshalBinary(data []byte) error {
	var m pb.Position
	if err := proto.Unmarshal(data, &m); err != nil {
		return errorf("INVALID_POSITION", "these bytes are not a position").with(err)
	}
	*p = positionOf(&m)
	return nil
}

// Equal reports whether both positions have the same parts.
func (p Position) Equal(other Position) bool {
	same := p.Incarnation == other.Incarnation && p.Index == other.Index && p.Ownership == other.Ownership
	if p.MessageID == nil || other.MessageID == nil {
		return same && p.MessageID == other.MessageID
	}
	return same && *p.MessageID == *other.MessageID
}

// isWhole reports whether the parts fit together: only a position after a message has a message ID and an ownership.
func (p Position) isWhole() bool {
	return p.Incarnation >= 0 && (p.Index >= 0 || (p.Index == -1 && p.MessageID == nil && p.Ownership == 0))
}

func (p Position) proto() *pb.Position {
	m := &pb.Position{Incarnation: p.Incarnation, Index: p.Index, Ownership: p.Ownership}
	if p.MessageID != nil {
		m.MessageId = &pb.MessageId{
			LedgerId: p.MessageID.LedgerID, EntryId: p.MessageID.EntryID, BatchIndex: p.MessageID.BatchIndex,
		}
	}
	return m
}

func positionOf(m *pb.Position) Position {
	p := Position{Incarnation: m.GetIncarnation(), Index: m.GetIndex(), Ownership: m.GetOwnership()}
	if m.GetMessageId() != nil {
		id := messageID(m.MessageId)
		p.MessageID = &id
	}
	return p
}
