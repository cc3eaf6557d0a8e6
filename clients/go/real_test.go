package seqdedupe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

func wait(t testing.TB, r Receipt) Published {
	t.Helper()
	published, err := r.Wait(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return published
}

func send(t testing.TB, p *Producer, id int64, payload string) Receipt {
	t.Helper()
	r, err := p.Send(t.Context(), id, Message{Payload: []byte(payload)})
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func reasonOf(err error) string {
	var e *Error
	if errors.As(err, &e) {
		return e.Reason
	}
	return fmt.Sprint(err)
}

func TestEverythingOfAMessageArrives(t *testing.T) {
	c, topic := newTestClient(t, realSidecar(t).address), newTopic()
	p := openProducer(t, c, topic, "producer ü", ProducerOptions{})
	if p.LastSequenceID() != -1 {
		t.Fatal(p.LastSequenceID())
	}
	sent := []Message{
		{Payload: []byte("plain")},
		{},
		{Payload: []byte{}, Key: []byte{}},
		{Payload: []byte("all"), Key: []byte("\xff\x00"), EventTime: time.UnixMilli(1234), Properties: map[string]string{"b": "", "a": "é"}},
	}
	var receipts []Receipt
	for i, m := range sent[:2] {
		receipts = append(receipts, must(t, first(p.Send(t.Context(), int64(10*i), m)), nil))
	}
	batch, err := p.SendBatch(t.Context(), []int64{20, 30}, sent[2:])
	if err != nil {
		t.Fatal(err)
	}
	outcomes := []Published{wait(t, receipts[0]), wait(t, receipts[1])}
	outcomes = append(outcomes, must(t, first(batch.Wait(t.Context())), nil)...)
	read := readAll(t, c, topic)
	if len(read) != len(sent) {
		t.Fatal(read)
	}
	for i, m := range read {
		got, want := fmt.Sprintf("%#v", m.Message), fmt.Sprintf("%#v", sent[i])
		if got != want && m.EventTime.Equal(sent[i].EventTime) == false {
			t.Errorf("message %d is %s, and was %s", i, got, want)
		}
		if m.Index != int64(i) || m.SequenceID != int64(10*i) || m.ProducerName != "producer ü" {
			t.Errorf("message %d: %+v", i, m)
		}
		o := outcomes[i]
		if o.Verdict != NotDup || o.Index != m.Index || o.MessageID != m.MessageID || o.SequenceID != m.SequenceID {
			t.Errorf("receipt %d: %+v of %+v", i, o, m)
		}
		if (m.Payload == nil) != (sent[i].Payload == nil) || (m.Key == nil) != (sent[i].Key == nil) {
			t.Errorf("message %d: nil and empty are not the same: %+v", i, m)
		}
	}
	again := wait(t, send(t, openProducer(t, c, topic, "producer ü", ProducerOptions{}), 10, "copy"))
	if again.Verdict != Dup || again.Index != 1 || again.MessageID != outcomes[1].MessageID {
		t.Error(again)
	}
}

func first[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func TestANewProcessFencesTheOldOneAndGoesOn(t *testing.T) {
	c, topic := newTestClient(t, realSidecar(t).address), newTopic()
	old := openProducer(t, c, topic, "shop", ProducerOptions{})
	wait(t, send(t, old, 7, "first"))
	fresh := openProducer(t, c, topic, "shop", ProducerOptions{})
	if fresh.LastSequenceID() != 7 {
		t.Fatal(fresh.LastSequenceID())
	}
	_, err := send(t, old, 8, "late").Wait(t.Context())
	if !errors.Is(err, ErrFenced) || reasonOf(err) != "FENCED" {
		t.Fatal(err)
	}
	if _, err := old.Send(t.Context(), 9, Message{}); !errors.Is(err, ErrFenced) {
		t.Fatal(err)
	}
	if got := wait(t, send(t, fresh, NextSequenceID, "next")); got.SequenceID != 8 || got.Verdict != NotDup {
		t.Fatal(got)
	}
}

func TestInvalidMessagesChangeNothing(t *testing.T) {
	c, topic := newTestClient(t, realSidecar(t).address), newTopic()
	p := openProducer(t, c, topic, "p", ProducerOptions{})
	send(t, p, 5, "one")
	for want, try := range map[string]func() error{
		"NOT_ASCENDING":       func() error { _, err := p.Send(t.Context(), 5, Message{}); return err },
		"INVALID_SEQUENCE_ID": func() error { _, err := p.Send(t.Context(), -2, Message{}); return err },
		"MESSAGE_TOO_LARGE": func() error {
			_, err := p.Send(t.Context(), 6, Message{Payload: make([]byte, maxPayloadBytes+1)})
			return err
		},
		"BATCH_TOO_LARGE": func() error {
			_, err := p.Send(t.Context(), 6, Message{Key: make([]byte, maxBatchBytes)})
			return err
		},
		"INVALID_REQUEST": func() error {
			_, err := p.Send(t.Context(), 6, Message{Properties: map[string]string{"\xff": ""}})
			return err
		},
		"INVALID_BATCH": func() error { _, err := p.SendBatch(t.Context(), []int64{6}, nil); return err },
		"INVALID_NAME":  func() error { _, err := c.NewProducer(t.Context(), topic, "", ProducerOptions{}); return err },
		"INVALID_TOPIC_NAME": func() error {
			_, err := c.NewProducer(t.Context(), "a b", "p", ProducerOptions{})
			return err
		},
	} {
		if err := try(); reasonOf(err) != want || !errors.Is(err, ErrInvalidRequest) {
			t.Errorf("%v is not %s", err, want)
		}
	}
	wait(t, send(t, p, NextSequenceID, "two"))
	if read := readAll(t, c, topic); len(read) != 2 || read[1].SequenceID != 6 {
		t.Error(read)
	}
}

func TestProducersOfATopicShareAStream(t *testing.T) {
	c, topic := newTestClient(t, realSidecar(t).address), newTopic()
	var all sync.WaitGroup
	for name := range 20 {
		p := openProducer(t, c, topic, fmt.Sprint("p", name), ProducerOptions{})
		all.Go(func() {
			for i := range 50 {
				if _, err := p.Send(t.Context(), int64(i), Message{Payload: []byte("x")}); err != nil {
					t.Error(err)
				}
			}
			if err := p.Flush(t.Context()); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	c.mu.Lock()
	if len(c.streams) != 1 {
		t.Error(len(c.streams))
	}
	c.mu.Unlock()
	if read := readAll(t, c, topic); len(read) != 1000 {
		t.Error(len(read))
	}
}

func TestPublisherRecognizesCopiesByID(t *testing.T) {
	s, topic := realSidecar(t), newTopic()
	s.createTopic(topic, pb.DeduplicationMode_DEDUPLICATION_MODE_DEDUPLICATION_ID)
	c := newTestClient(t, s.address)
	p := first(c.NewPublisher(topic, PublisherOptions{}))
	defer p.Close()
	var all sync.WaitGroup
	for i := range 200 { // each ID twice
		all.Go(func() {
			if _, err := p.Send(t.Context(), fmt.Append(nil, i/2), Message{Payload: []byte("x")}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	copyOf := first(p.Send(t.Context(), []byte("7"), Message{Payload: []byte("x")}))
	if copyOf.Verdict != Dup || copyOf.Index < 0 {
		t.Error(copyOf)
	}
	if _, err := p.Send(t.Context(), []byte{}, Message{}); reasonOf(err) != "INVALID_DEDUPLICATION_ID" {
		t.Error(err)
	}
	read := readAll(t, c, topic)
	if len(read) != 100 || string(read[copyOf.Index].DeduplicationID) != "7" || read[0].SequenceID != -1 {
		t.Error(len(read))
	}
	first(p.Send(t.Context(), nil, Message{}))
	if read = readAll(t, c, topic); len(read[100].DeduplicationID) != 16 || read[100].DeduplicationID[6]>>4 != 7 {
		t.Error(read[100])
	}
	wrong := newTopic()
	openProducer(t, c, wrong, "p", ProducerOptions{})
	other := first(c.NewPublisher(wrong, PublisherOptions{}))
	defer other.Close()
	if _, err := other.Send(t.Context(), nil, Message{}); !errors.Is(err, ErrInvalidRequest) {
		t.Error(err)
	}
}

func TestReadersStartWhereTheyAreTold(t *testing.T) {
	c, topic := newTestClient(t, realSidecar(t).address), newTopic()
	p := openProducer(t, c, topic, "p", ProducerOptions{})
	for i := range 10 {
		send(t, p, int64(i), fmt.Sprint(i))
	}
	if err := p.Flush(t.Context()); err != nil {
		t.Fatal(err)
	}
	fourth := readAll(t, c, topic)[3].Position
	text := first(ParsePosition(fourth.String()))
	if !text.Equal(fourth) || !strings.Contains(fourth.String(), "@3#") {
		t.Error(fourth)
	}
	for _, one := range []struct {
		options     ReaderOptions
		first, next int64
	}{
		{ReaderOptions{}, 0, 10},
		{ReaderOptions{Start: Latest()}, 10, 10},
		{ReaderOptions{Start: AtIndex(7)}, 7, 10},
		{ReaderOptions{Start: After(text)}, 4, 10},
		{ReaderOptions{Start: AtIndex(2), StopIndex: 5}, 2, 5},
	} {
		r := first(c.NewReader(topic, one.options))
		at := one.first
		for m, err := range r.All(t.Context()) {
			if err != nil || m.Index != at {
				t.Fatal(one, m, err)
			}
			at++
		}
		if at != one.next {
			t.Error(one, at)
		}
		r.Close()
	}
	// A reader that follows: a context that ends loses nothing.
	r := first(c.NewReader(topic, ReaderOptions{Start: AtIndex(9), Follow: true}))
	defer r.Close()
	if batch, err := r.NextBatch(t.Context()); err != nil || len(batch) != 1 {
		t.Fatal(batch, err)
	}
	short, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if _, err := r.Next(short); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	send(t, p, 10, "10")
	if m, err := r.Next(t.Context()); err != nil || m.Index != 10 {
		t.Fatal(m, err)
	}
	ends := first(c.Ends(t.Context(), topic))
	if ends.FirstIndex != 0 || ends.Last.Index != 10 {
		t.Error(ends)
	}
	for _, bad := range []struct {
		topic string
		start Start
		want  error
	}{
		{topic, AtIndex(12), ErrPosition},
		{topic, After(Position{Incarnation: 1, Index: 3}), ErrPosition},
		{"no-such-topic", Earliest(), ErrNotFound},
	} {
		r := first(c.NewReader(bad.topic, ReaderOptions{Start: bad.start}))
		if _, err := r.Next(t.Context()); !errors.Is(err, bad.want) {
			t.Error(bad, err)
		}
		r.Close()
	}
}

func TestCursorKeepsAPosition(t *testing.T) {
	c, topic := newTestClient(t, realSidecar(t).address), newTopic()
	p := openProducer(t, c, topic, "p", ProducerOptions{})
	for i := range 4 {
		send(t, p, int64(i), "x")
	}
	p.Flush(t.Context())
	options := ReaderOptions{Cursor: c.Cursor(topic, "mailer")}
	one, two := first(c.NewReader(topic, options)), first(c.NewReader(topic, options))
	defer one.Close()
	defer two.Close()
	first(two.Next(t.Context()))
	first(one.Next(t.Context()))
	first(one.Next(t.Context()))
	if err := one.SavePosition(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := two.SavePosition(t.Context()); reasonOf(err) != "CURSOR_MOVED" || !errors.Is(err, ErrFenced) {
		t.Fatal(err)
	}
	again := first(c.NewReader(topic, options))
	defer again.Close()
	if m := first(again.Next(t.Context())); m.Index != 2 {
		t.Error(m.Index)
	}
	for {
		if _, err := again.Next(t.Context()); err == io.EOF {
			break
		}
	}
	if err := again.SavePosition(t.Context()); err != nil {
		t.Fatal(err)
	}
	if kept := first(options.Cursor.Read(t.Context())); kept.Position.Index != 3 {
		t.Error(kept)
	}
}

func TestTokens(t *testing.T) {
	s := startSidecar(t, "--authentication", "token")
	token := filepath.Join(s.folder, "data", "token")
	tryWith := func(credentials Credentials) error {
		c, err := NewClient(s.address, ClientOptions{Credentials: &credentials})
		if err != nil {
			return err
		}
		defer c.Close()
		p, err := c.NewProducer(t.Context(), "t", "p", ProducerOptions{})
		if err == nil {
			err = p.Close(t.Context())
		}
		return err
	}
	data := first(os.ReadFile(token))
	calls := 0
	function := func(context.Context) (string, error) { calls++; return string(data), nil }
	for _, good := range []Credentials{{TokenFile: token}, {Token: string(data)}, {TokenFunc: function}} {
		if err := tryWith(good); err != nil {
			t.Error(err)
		}
	}
	if calls == 0 {
		t.Error("the function was not called")
	}
	for want, bad := range map[string]Credentials{
		"UNAUTHENTICATED":     {Token: "wrong"},
		"INVALID_CREDENTIALS": {TokenFile: token + "-not"},
	} {
		if err := tryWith(bad); reasonOf(err) != want {
			t.Errorf("%v is not %s", err, want)
		}
	}
	_, err := NewClient("example.org:1", ClientOptions{Credentials: &Credentials{Token: "t"}})
	if err != nil {
		t.Fatal(err)
	}
}
