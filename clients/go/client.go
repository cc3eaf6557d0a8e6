package seqdedupe

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"net"
	"regexp"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

const (
	// callTimeout is longer than any wait inside the sidecar.
	callTimeout = 30 * time.Second
	// maxAnswerBytes is the size of the largest accepted answer, which may have all receipts of a commit.
	maxAnswerBytes = 64 << 20
	maxNameBytes   = 255

	firstDelay   = 20 * time.Millisecond
	longestDelay = 2 * time.Second
)

// ClientOptions configures a [Client]. The zero value takes the credentials from the environment.
type ClientOptions struct {
	// Credentials are shown to all sidecars. Default: [CredentialsFromEnvironment].
	Credentials *Credentials
	// Logger receives warnings. Default: [slog.Default].
	Logger *slog.Logger
}

// Client is a client of one sidecar, or of several sidecars in front of one log. It is safe for concurrent use.
//
// The client's producers and publishers share one connection per sidecar, and those of one topic share a stream. The
// other calls share a second connection. Each reader has its own connection.
type Client struct {
	sidecars    sidecars
	credentials Credentials
	logger      *slog.Logger

	mu          sync.Mutex
	connections map[connectionKey]*connection
	streams     map[streamKey]*stream
	foundAt     map[string]string // the address of the sidecar of each topic
}

type connectionKey struct {
	address    string
	forStreams bool
}

// A connection to a sidecar. It stays open while it has users, or until it is stale.
type connection struct {
	*grpc.ClientConn
	key       connectionKey
	users     int
	stale     bool
	mu        sync.Mutex
	dialError error // the last error of the client's own checks while dialing
}

// maxRemembered is the number of topics whose sidecar is remembered.
const maxRemembered = 10_000

// NewClient returns a client. The address is host:port or unix:path. For several sidecars, give all addresses,
// separated by commas; a domain (*.example.org) allows sidecars to redirect the client to any of its hosts. NewClient
// does not connect. Errors: INVALID_ADDRESS, INVALID_CREDENTIALS.
func NewClient(address string, options ClientOptions) (*Client, error) {
	c := &Client{
		logger:      options.Logger,
		connections: map[connectionKey]*connection{}, streams: map[streamKey]*stream{}, foundAt: map[string]string{},
	}
	if c.logger == nil {
		c.logger = slog.Default()
	}
	var err error
	if c.sidecars, err = parseSidecars(address); err != nil {
		return nil, err
	}
	if options.Credentials != nil {
		c.credentials = *options.Credentials
	} else {
		c.credentials = CredentialsFromEnvironment()
	}
	if err := c.credentials.check(); err != nil {
		return nil, err
	}
	return c, nil
}

// Close closes the connections. Close producers, publishers and readers first.
func (c *Client) Close() error {
	var unused []*connection
	c.mu.Lock()
	for _, conn := range c.connections {
		conn.stale = true
		if conn.users == 0 {
			unused = append(unused, conn)
		}
	}
	clear(c.connections)
	c.mu.Unlock()
	for _, conn := range unused {
		conn.Close()
	}
	return nil
}

// dial returns a new connection, which connects at the first call.
func (c *Client) dial(address string) (*connection, error) {
	config, err := c.credentials.tlsConfig()
	if err != nil {
		return nil, err
	}
	path, isUnix := strings.CutPrefix(address, unixPrefix)
	conn := &connection{key: connectionKey{address: address}}
	transport, target, network, checks := insecure.NewCredentials(), address, "tcp", false
	switch {
	case isUnix:
		network, address, target = "unix", path, "localhost"
	case config != nil:
		transport = credentials.NewTLS(config)
	case c.credentials.hasToken() && !isLocal(address) && !c.credentials.AllowInsecureToken:
		return nil, errorf("INSECURE_ADDRESS", "there is a token, but no TLS connection to the sidecar at %s", address)
	default:
		checks = c.credentials.hasToken() && isLocal(address)
	}
	// grpc-go allows at least 10 s between pings.
	ping := keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 30 * time.Second}
	if !c.sidecars.isOne() {
		ping = keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 5 * time.Second}
	}
	options := []grpc.DialOption{
		grpc.WithTransportCredentials(transport),
		grpc.WithKeepaliveParams(ping),
		grpc.WithConnectParams(grpc.ConnectParams{
			Backoff:           backoff.Config{BaseDelay: 50 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: time.Second},
			MinConnectTimeout: ping.Timeout,
		}),
		grpc.WithDefaultCallOptions(
			grpc.MaxCallRecvMsgSize(maxAnswerBytes), grpc.MaxCallSendMsgSize(maxAnswerBytes)),
		grpc.WithDisableServiceConfig(),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			raw, err := new(net.Dialer).DialContext(ctx, network, address)
			if err == nil && checks {
				if err = c.credentials.checkListener(raw); err != nil {
					raw.Close()
				}
			}
			conn.mu.Lock()
			conn.dialError = err
			conn.mu.Unlock()
			return raw, err
		}),
	}
	if c.credentials.hasToken() {
		options = append(options, grpc.WithPerRPCCredentials(perRPC{&c.credentials}))
	}
	conn.ClientConn, err = grpc.NewClient("passthrough:///"+target, options...)
	if err != nil {
		return nil, errorf("INVALID_ADDRESS", "%s: %v", conn.key.address, err).with(err)
	}
	return conn, nil
}

// err converts an error of a call over this connection.
func (conn *connection) err(err error) *Error {
	e := asError(err, conn.key.address)
	if e.Reason != "UNREACHABLE" {
		return e
	}
	conn.mu.Lock()
	defer conn.mu.Unlock()
	var own *Error
	if errors.As(conn.dialError, &own) {
		return own
	}
	return e
}

// connection returns the shared connection to this sidecar. The caller releases it.
func (c *Client) connection(address string, forStreams bool) (*connection, error) {
	key := connectionKey{address, forStreams}
	use := func(made *connection) *connection {
		c.mu.Lock()
		defer c.mu.Unlock()
		conn := c.connections[key]
		if conn == nil && made != nil {
			conn = made
			c.connections[key] = conn
		}
		if conn != nil {
			conn.users++
		}
		return conn
	}
	if conn := use(nil); conn != nil {
		return conn, nil
	}
	made, err := c.dial(address) // without the lock, because it reads files
	if err != nil {
		return nil, err
	}
	made.key = key
	conn := use(made)
	if conn != made { // another call was faster
		made.Close()
	}
	return conn, nil
}

// release ends a use of a shared connection, with the error of that use. After the loss of the connection, the next user
// gets a new one: it connects at once, and reads the TLS files again.
func (c *Client) release(conn *connection, e *Error) {
	c.mu.Lock()
	if e != nil && isLost(e) {
		conn.stale = true
		if c.connections[conn.key] == conn {
			delete(c.connections, conn.key)
		}
	}
	conn.users--
	closes := conn.users == 0 && conn.stale
	c.mu.Unlock()
	if closes {
		conn.Close()
	}
}

// isLost reports whether the connection of this error's call is lost or silent, so that another one may help.
func isLost(e *Error) bool {
	switch e.Reason {
	case "UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR", "OUTCOME_UNKNOWN", "UNTRUSTED_LISTENER":
		return true
	}
	return false
}

// A method makes one unary call.
type method func(ctx context.Context, conn *grpc.ClientConn, options ...grpc.CallOption) (proto.Message, error)

// unary makes one unary call to this sidecar.
func (c *Client) unary(ctx context.Context, address string, do method) *Error {
	conn, err := c.connection(address, false)
	if err != nil {
		return asError(err, address)
	}
	limited, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var e *Error
	if err := answered(limited, conn.ClientConn, do); err != nil {
		e = conn.err(err)
	}
	if ctx.Err() != nil { // the caller has ended the call, so the error says nothing of the connection
		c.release(conn, nil)
	} else {
		c.release(conn, e)
	}
	return e
}

// answered makes a call. A server that is not a sidecar may answer every call with OK and an empty message: the contract
// (publish.proto) says how to tell.
func answered(ctx context.Context, conn *grpc.ClientConn, do method) error {
	var trailer metadata.MD
	answer, err := do(ctx, conn, grpc.Trailer(&trailer))
	if err != nil || proto.Size(answer) > 0 || len(trailer.Get("seqdedupe-empty")) > 0 {
		return err
	}
	switch answer.(type) {
	case *pb.GetCursorResponse, *pb.MoveCursorResponse:
		version, err := pb.NewAdminServiceClient(conn).GetVersion(ctx, &pb.GetVersionRequest{})
		if err != nil || proto.Size(version) > 0 {
			return err
		}
	}
	return errorf("NOT_A_SIDECAR", "%s answered with an empty message, which no sidecar sends", conn.Target())
}

// call makes a unary call to the owner of the topic. It waits for up to 30 seconds while the topic recovers or moves. If
// the call makes changes (isLook is false), it is repeated only if the earlier attempt has certainly changed nothing.
func (c *Client) call(ctx context.Context, topic string, isLook bool, do method) error {
	r := newRoute(&c.sidecars, topic)
	c.mu.Lock()
	if address := c.foundAt[topic]; address != "" {
		r.address = address
	}
	c.mu.Unlock()
	delays := delays{longest: time.Second}
	giveUpAt, hasExpired := time.Now().Add(callTimeout), false
	for {
		said := c.unary(ctx, r.address, do)
		if said == nil {
			c.mu.Lock()
			if len(c.foundAt) >= maxRemembered {
				clear(c.foundAt)
			}
			c.foundAt[topic] = r.address
			c.mu.Unlock()
			return nil
		}
		if ctx.Err() != nil {
			return ended(ctx, "no answer from "+r.address)
		}
		e := r.doubted(said)
		if !e.isTemporary() {
			return e
		}
		isExpiry := e.Reason == "TOKEN_EXPIRED" && !hasExpired
		hasExpired = hasExpired || isExpiry
		// A change waits where it may have begun.
		stays := isExpiry || e.Reason == "RECOVERING" && !isLook
		if !stays && !isLook && !passes(e) && !neverSent(e) {
			if isLost(e) {
				return errorf("OUTCOME_UNKNOWN", "the call may have taken effect: %s", e.Message).with(e)
			}
			return e
		}
		if !stays && r.movesOn(e) {
			continue
		}
		delay := max(delays.next(), e.RetryDelay)
		if !(stays || r.passing()) || time.Now().Add(delay).After(giveUpAt) {
			return e
		}
		if err := sleep(ctx, delay); err != nil {
			return ended(ctx, e.Error())
		}
	}
}

// TopicEnds are the two ends of a topic.
type TopicEnds struct {
	// FirstIndex is the index of the first message that is still stored.
	FirstIndex int64
	// Last is the position of the last message ever stored.
	Last Position
}

// Ends returns the current ends of a topic.
func (c *Client) Ends(ctx context.Context, topic string) (TopicEnds, error) {
	full, err := topicName(topic)
	if err != nil {
		return TopicEnds{}, err
	}
	var answer *pb.GetLastMessageIdResponse
	err = c.call(ctx, full, true, func(ctx context.Context, conn *grpc.ClientConn, o ...grpc.CallOption) (proto.Message, error) {
		var err error
		answer, err = pb.NewReadServiceClient(conn).GetLastMessageId(ctx, &pb.GetLastMessageIdRequest{Topic: full}, o...)
		return answer, err
	})
	if err != nil {
		return TopicEnds{}, err
	}
	return TopicEnds{answer.FirstIndex, positionOf(answer.Last)}, nil
}

// LocateTime returns the index of the first message published at or after a time, or the end of the topic.
func (c *Client) LocateTime(ctx context.Context, topic string, at time.Time) (int64, error) {
	full, err := topicName(topic)
	if err != nil {
		return 0, err
	}
	var answer *pb.LocateResponse
	request := &pb.LocateRequest{Topic: full, By: &pb.LocateRequest_PublishTimeMs{PublishTimeMs: at.UnixMilli()}}
	err = c.call(ctx, full, true, func(ctx context.Context, conn *grpc.ClientConn, o ...grpc.CallOption) (proto.Message, error) {
		var err error
		answer, err = pb.NewReadServiceClient(conn).Locate(ctx, request, o...)
		return answer, err
	})
	return answer.GetIndex(), err
}

var (
	shortTopic = regexp.MustCompile(`^[\w.:=-]+$`)
	fullTopic  = regexp.MustCompile(`^persistent://[\w.=-]+/[\w.=-]+/[\w.:=-]+$`)
)

// topicName returns the full name of a topic.
func topicName(name string) (string, error) {
	full := name
	if shortTopic.MatchString(name) {
		full = "persistent://public/default/" + name
	} else if !strings.Contains(name, "://") {
		full = "persistent://" + name
	}
	if !fullTopic.MatchString(full) || len(full) > maxNameBytes {
		return "", errorf("INVALID_TOPIC_NAME",
			"%.80q is not a topic name: it should be persistent://tenant/namespace/name or a short name", name)
	}
	return full, nil
}

// delays are pauses that double, each shortened at random by up to a half.
type delays struct{ last, longest time.Duration }

func (d *delays) next() time.Duration {
	d.last = min(max(2*d.last, firstDelay), d.longest)
	return d.last/2 + rand.N(d.last/2)
}

func sleep(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
