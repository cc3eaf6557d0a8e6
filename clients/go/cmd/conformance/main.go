// Conformance speaks the line protocol of the harness tests/client_conformance, which judges clients: it reads commands
// from standard input and writes answers to standard output, one JSON object in each line.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"seqdedupe.dev/go"
)

type object map[string]any

type command struct {
	ID                int64           `json:"id"`
	Do                string          `json:"do"`
	On                string          `json:"on"`
	Addresses         []string        `json:"addresses"`
	Topic             string          `json:"topic"`
	ProducerName      string          `json:"producer_name"`
	DeliveryTimeoutMs number          `json:"delivery_timeout_ms"`
	MaxInFlightBytes  number          `json:"max_in_flight_bytes"`
	Messages          []message       `json:"messages"`
	Start             json.RawMessage `json:"start"`
	StopIndex         string          `json:"stop_index"`
	Follow            bool            `json:"follow"`
	Count             number          `json:"count"`
	Name              string          `json:"name"`
	Expected          *cursorValue    `json:"expected"`
	New               *cursorValue    `json:"new"`
}

// A number is decimal text, or a number of JSON.
type number int64

func (n *number) UnmarshalJSON(data []byte) error {
	value, err := strconv.ParseInt(strings.Trim(string(data), `"`), 10, 64)
	*n = number(value)
	return err
}

type message struct {
	SequenceID      string            `json:"sequence_id"`
	DeduplicationID []byte            `json:"deduplication_id"`
	Payload         *[]byte           `json:"payload"`
	Key             *[]byte           `json:"key"`
	Properties      map[string]string `json:"properties"`
	EventTimeMs     number            `json:"event_time_ms"`
}

func (m *message) native() seqdedupe.Message {
	n := seqdedupe.Message{Properties: m.Properties}
	if m.Payload != nil {
		n.Payload = append([]byte{}, *m.Payload...)
	}
	if m.Key != nil {
		n.Key = append([]byte{}, *m.Key...)
	}
	if m.EventTimeMs != 0 {
		n.EventTime = time.UnixMilli(int64(m.EventTimeMs))
	}
	return n
}

type cursorValue struct {
	Position []byte `json:"position"`
	Note     string `json:"note"`
}

func (v *cursorValue) native() (*seqdedupe.CursorValue, error) {
	if v == nil {
		return nil, nil
	}
	n := seqdedupe.CursorValue{Note: v.Note}
	return &n, n.Position.UnmarshalBinary(v.Position)
}

// A session is a client with its objects, from one connect to the next.
type session struct {
	ctx     context.Context
	cancel  context.CancelFunc
	client  *seqdedupe.Client
	mu      sync.Mutex
	objects map[string]any
	queues  map[string]chan command
}

type program struct {
	out     sync.Mutex
	session *session
}

func (p *program) print(o object) {
	line, err := json.Marshal(o)
	if err != nil {
		panic(err)
	}
	p.out.Lock()
	defer p.out.Unlock()
	os.Stdout.Write(append(line, '\n'))
}

func (p *program) answer(id int64, ok object, err error) {
	if err == nil {
		if ok == nil {
			ok = object{}
		}
		p.print(object{"id": id, "ok": ok})
		return
	}
	reason, message := "INTERNAL", err.Error()
	var e *seqdedupe.Error
	if errors.As(err, &e) {
		reason, message = e.Reason, e.Message
	}
	p.print(object{"id": id, "error": object{"reason": reason, "message": message}})
}

func main() {
	p := &program{session: newSession(nil)}
	lines := bufio.NewReaderSize(os.Stdin, 1<<20)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			os.Exit(0)
		}
		var c command
		if err := json.Unmarshal(line, &c); err != nil {
			panic(err)
		}
		if c.Do == "connect" && c.On == "" {
			p.session.drop()
			client, err := seqdedupe.NewClient(strings.Join(c.Addresses, ","), seqdedupe.ClientOptions{})
			p.session = newSession(client)
			p.answer(c.ID, nil, err)
			continue
		}
		p.enqueue(p.session, c)
	}
}

func newSession(client *seqdedupe.Client) *session {
	s := &session{client: client, objects: map[string]any{}, queues: map[string]chan command{}}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// drop ends the session's objects without waiting for receipts.
func (s *session) drop() {
	s.cancel()
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, o := range s.objects {
		switch o := o.(type) {
		case *seqdedupe.Producer:
			o.Close(s.ctx)
		case *seqdedupe.Publisher:
			o.Close()
		}
	}
}

func (p *program) enqueue(s *session, c command) {
	queue := s.queues[c.On]
	if queue == nil {
		queue = make(chan command, 1<<16)
		s.queues[c.On] = queue
		go func() {
			for {
				select {
				case c := <-queue:
					p.run(s, c)
				case <-s.ctx.Done():
					return
				}
			}
		}()
	}
	queue <- c
}

func (s *session) put(name string, o any, err error) error {
	if err == nil {
		s.mu.Lock()
		s.objects[name] = o
		s.mu.Unlock()
	}
	return err
}

func (p *program) run(s *session, c command) {
	s.mu.Lock()
	on := s.objects[c.On]
	s.mu.Unlock()
	var ok object
	var err error
	switch c.Do {
	case "hello":
		ok = object{"protocol": 1, "client": "go 0.1", "lacks": []string{}}
	case "open_producer":
		var producer *seqdedupe.Producer
		producer, err = s.client.NewProducer(s.ctx, c.Topic, c.ProducerName, seqdedupe.ProducerOptions{
			DeliveryTimeout:  time.Duration(c.DeliveryTimeoutMs) * time.Millisecond,
			MaxInFlightBytes: int(c.MaxInFlightBytes),
		})
		if s.put(c.On, producer, err) == nil {
			ok = object{"last_sequence_id": text(producer.LastSequenceID())}
		}
	case "open_publisher":
		var publisher *seqdedupe.Publisher
		publisher, err = s.client.NewPublisher(c.Topic, seqdedupe.PublisherOptions{
			DeliveryTimeout: time.Duration(c.DeliveryTimeoutMs) * time.Millisecond,
		})
		err = s.put(c.On, publisher, err)
	case "open_reader":
		err = p.openReader(s, c)
	case "send":
		switch o := on.(type) {
		case *seqdedupe.Producer:
			p.send(s, c, o)
		case *seqdedupe.Publisher:
			p.publish(s, c, o)
		}
		return
	case "flush":
		if producer, isProducer := on.(*seqdedupe.Producer); isProducer {
			err = producer.Flush(s.ctx)
		}
	case "close":
		switch o := on.(type) {
		case *seqdedupe.Producer:
			err = o.Close(s.ctx)
		case io.Closer:
			err = o.Close()
		}
	case "read":
		ok, err = read(s, on.(*seqdedupe.Reader), int(c.Count))
	case "ends":
		var ends seqdedupe.TopicEnds
		if ends, err = s.client.Ends(s.ctx, c.Topic); err == nil {
			ok = object{"first_index": text(ends.FirstIndex), "last_index": text(ends.Last.Index)}
		}
	case "get_cursor":
		var value *seqdedupe.CursorValue
		if value, err = s.client.Cursor(c.Topic, c.Name).Read(s.ctx); err == nil {
			ok = object{"kept": nil}
			if value != nil {
				position, _ := value.Position.MarshalBinary()
				ok["kept"] = cursorValue{position, value.Note}
			}
		}
	case "move_cursor":
		err = move(s, c)
	default:
		panic("no such command: " + c.Do)
	}
	p.answer(c.ID, ok, err)
}

func text(n int64) string { return strconv.FormatInt(n, 10) }

func receipt(p seqdedupe.Published) object {
	o := object{"verdict": p.Verdict.String(), "index": text(p.Index), "message_id": nil}
	if p.Index >= 0 {
		o["message_id"] = idOf(p.MessageID)
	}
	return o
}

func idOf(id seqdedupe.MessageID) []any {
	return []any{text(id.LedgerID), text(id.EntryID), id.BatchIndex}
}

func (p *program) send(s *session, c command, producer *seqdedupe.Producer) {
	var all []seqdedupe.Receipt
	for i := range c.Messages {
		id, err := strconv.ParseInt(c.Messages[i].SequenceID, 10, 64)
		if err == nil {
			var one seqdedupe.Receipt
			one, err = producer.Send(s.ctx, id, c.Messages[i].native())
			all = append(all, one)
		}
		if err != nil {
			p.answer(c.ID, nil, err)
			return
		}
	}
	p.print(object{"id": c.ID, "accepted": true})
	go func() {
		receipts := make([]object, len(all))
		for i, one := range all {
			published, err := one.Wait(s.ctx)
			if err != nil {
				p.answer(c.ID, nil, err)
				return
			}
			receipts[i] = receipt(published)
			receipts[i]["sequence_id"] = text(published.SequenceID)
		}
		p.answer(c.ID, object{"receipts": receipts}, nil)
	}()
}

func (p *program) publish(s *session, c command, publisher *seqdedupe.Publisher) {
	ids, messages := make([][]byte, len(c.Messages)), make([]seqdedupe.Message, len(c.Messages))
	for i := range c.Messages {
		ids[i], messages[i] = c.Messages[i].DeduplicationID, c.Messages[i].native()
	}
	p.print(object{"id": c.ID, "accepted": true})
	go func() {
		all, err := publisher.SendBatch(s.ctx, ids, messages)
		receipts := make([]object, len(all))
		for i, published := range all {
			receipts[i] = receipt(published)
			receipts[i]["deduplication_id"] = ids[i]
		}
		p.answer(c.ID, object{"receipts": receipts}, err)
	}()
}

func (p *program) openReader(s *session, c command) error {
	options := seqdedupe.ReaderOptions{Follow: c.Follow}
	var word string
	var place struct {
		Index    string `json:"index"`
		Position []byte `json:"position"`
	}
	if json.Unmarshal(c.Start, &word) == nil {
		if word == "latest" {
			options.Start = seqdedupe.Latest()
		}
	} else if err := json.Unmarshal(c.Start, &place); err != nil {
		return err
	} else if place.Index != "" {
		index, err := strconv.ParseInt(place.Index, 10, 64)
		if err != nil {
			return err
		}
		options.Start = seqdedupe.AtIndex(index)
	} else {
		var position seqdedupe.Position
		if err := position.UnmarshalBinary(place.Position); err != nil {
			return err
		}
		options.Start = seqdedupe.After(position)
	}
	if c.StopIndex != "" {
		stop, err := strconv.ParseInt(c.StopIndex, 10, 64)
		if err != nil {
			return err
		}
		options.StopIndex = stop
	}
	reader, err := s.client.NewReader(c.Topic, options)
	return s.put(c.On, reader, err)
}

func read(s *session, reader *seqdedupe.Reader, count int) (object, error) {
	messages, ended := []object{}, false
	for len(messages) < count {
		m, err := reader.Next(s.ctx)
		if err == io.EOF {
			ended = true
			break
		}
		if err != nil {
			return nil, err
		}
		position, _ := m.Position.MarshalBinary()
		o := object{
			"payload": nil, "index": text(m.Index), "producer_name": m.ProducerName, "sequence_id": text(m.SequenceID),
			"position": position, "message_id": idOf(m.MessageID),
		}
		if m.Payload != nil {
			o["payload"] = m.Payload
		}
		if m.Key != nil {
			o["key"] = m.Key
		}
		if m.DeduplicationID != nil {
			o["deduplication_id"] = m.DeduplicationID
		}
		if len(m.Properties) > 0 {
			o["properties"] = m.Properties
		}
		if !m.EventTime.IsZero() {
			o["event_time_ms"] = text(m.EventTime.UnixMilli())
		}
		messages = append(messages, o)
	}
	return object{"messages": messages, "ended": ended}, nil
}

func move(s *session, c command) error {
	expected, err := c.Expected.native()
	if err != nil {
		return err
	}
	value, err := c.New.native()
	if err != nil {
		return err
	}
	return s.client.Cursor(c.Topic, c.Name).CompareAndSet(s.ctx, expected, *value)
}
