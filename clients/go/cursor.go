package seqdedupe

import (
	"context"
	"errors"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

// CursorValue is the value of a cursor.
type CursorValue struct {
	Position Position
	// Note is up to 1,024 bytes of UTF-8. Only the cursor's owner interprets it.
	Note string
}

func (v CursorValue) equal(other CursorValue) bool {
	return v.Note == other.Note && v.Position.Equal(other.Position)
}

// Cursor is durable storage of one position. Implement it to keep a reader's position elsewhere. Effects of messages
// happen at least once: after a crash, the reader returns the messages after the stored position again.
type Cursor interface {
	// Read returns the stored value; nil if nothing was ever stored.
	Read(ctx context.Context) (*CursorValue, error)
	// CompareAndSet stores a value in one step, if the stored value equals expected (nil: nothing is stored). When it
	// returns nil, the value is durable. Otherwise it returns CURSOR_MOVED, or OUTCOME_UNKNOWN if either value may be
	// stored. After any other [Error], nothing has changed.
	CompareAndSet(ctx context.Context, expected *CursorValue, new CursorValue) error
}

// Cursor returns a named cursor of a topic, which the sidecar stores. The name has 1 to 255 bytes without control
// characters. A topic has at most 32 cursors. Calls wait for up to 30 seconds while the topic recovers or moves.
func (c *Client) Cursor(topic, name string) Cursor { return &sidecarCursor{c, topic, name} }

type sidecarCursor struct {
	client      *Client
	topic, name string
}

func (s *sidecarCursor) Read(ctx context.Context) (*CursorValue, error) {
	topic, err := topicName(s.topic)
	if err != nil {
		return nil, err
	}
	var answer *pb.GetCursorResponse
	err = s.client.call(ctx, topic, true, func(ctx context.Context, conn *grpc.ClientConn, o ...grpc.CallOption) (proto.Message, error) {
		var err error
		answer, err = pb.NewReadServiceClient(conn).GetCursor(ctx, &pb.GetCursorRequest{Topic: topic, Name: s.name}, o...)
		return answer, err
	})
	if err != nil || answer.Kept == nil {
		return nil, err
	}
	return &CursorValue{positionOf(answer.Kept.Position), answer.Kept.Note}, nil
}

func (s *sidecarCursor) CompareAndSet(ctx context.Context, expected *CursorValue, new CursorValue) error {
	topic, err := topicName(s.topic)
	if err != nil {
		return err
	}
	if !new.Position.isWhole() {
		return errorf("INVALID_POSITION", "%v is not a position: its parts do not fit together", new.Position)
	}
	value := func(v CursorValue) *pb.CursorValue {
		return &pb.CursorValue{Position: v.Position.proto(), Note: v.Note}
	}
	request := &pb.MoveCursorRequest{Topic: topic, Name: s.name, New: value(new)}
	if expected != nil {
		request.Expected = value(*expected)
	}
	return s.client.call(ctx, topic, false, func(ctx context.Context, conn *grpc.ClientConn, o ...grpc.CallOption) (proto.Message, error) {
		return pb.NewReadServiceClient(conn).MoveCursor(ctx, request, o...)
	})
}

// cursorMoves moves a cursor that only this object moves. It recognizes its own moves, even if their answers were lost.
type cursorMoves struct {
	cursor  Cursor
	kept    *CursorValue  // last read, or last set with success
	inDoubt []CursorValue // moves from that value that may have taken effect
}

func (m *cursorMoves) read(ctx context.Context) (*CursorValue, error) {
	kept, err := m.cursor.Read(ctx)
	if err == nil {
		m.kept = kept
	}
	return kept, err
}

func (m *cursorMoves) move(ctx context.Context, new CursorValue) error {
	for {
		err := m.cursor.CompareAndSet(ctx, m.kept, new)
		var e *Error
		switch {
		case err == nil:
			m.kept, m.inDoubt = &new, nil
			return nil
		case !errors.As(err, &e) || e.Reason == "OUTCOME_UNKNOWN":
			m.inDoubt = append(m.inDoubt, new)
			return err
		case e.Reason != "CURSOR_MOVED" || len(m.inDoubt) == 0:
			return err
		}
		found, readErr := m.cursor.Read(ctx)
		if readErr != nil || found == nil || !slices.ContainsFunc(m.inDoubt, found.equal) {
			return err
		}
		m.kept, m.inDoubt = found, nil // the other moves expected a value that is no longer stored
	}
}
