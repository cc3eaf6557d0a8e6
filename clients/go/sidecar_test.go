package seqdedupe

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

// A sidecar is a real one, as a separate process. After a restart it has the same address and data.
type sidecar struct {
	t       testing.TB
	address string
	folder  string
	flags   []string
	command *exec.Cmd
}

// python is the environment of the project that these tests use; SEQDEDUPE_PYTHON names another one.
func python(t testing.TB) string {
	path := os.Getenv("SEQDEDUPE_PYTHON")
	if path == "" {
		path, _ = filepath.Abs("../../.venv/bin/python")
	}
	if _, err := os.Stat(path); err != nil {
		t.Skipf("there is no sidecar to test with: %v (make a virtual environment with `make`, or set SEQDEDUPE_PYTHON)", err)
	}
	return path
}

func startSidecar(t testing.TB, flags ...string) *sidecar {
	t.Helper()
	python(t)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &sidecar{t: t, address: listener.Addr().String(), folder: t.TempDir(), flags: flags}
	listener.Close()
	s.start()
	t.Cleanup(s.kill)
	return s
}

func (s *sidecar) start() {
	s.t.Helper()
	flags := append([]string{"-m", "broker_sidecar", "--data-directory", filepath.Join(s.folder, "data"),
		"--listen", s.address, "--log-format", "json"}, s.flags...)
	if !strings.Contains(strings.Join(s.flags, " "), "--authentication") {
		flags = append(flags, "--authentication", "none")
	}
	s.command = exec.Command(python(s.t), flags...)
	s.command.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // also if the tests end by a panic
	errors, err := s.command.StderrPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := s.command.Start(); err != nil {
		s.t.Fatal(err)
	}
	serving := make(chan string, 1) // "", or what it has said when it ended
	go func() {
		var said []string
		for lines := bufio.NewScanner(errors); lines.Scan(); {
			if said = append(said, lines.Text()); strings.Contains(lines.Text(), `"serving"`) {
				serving <- ""
			}
		}
		select {
		case serving <- "it ended: " + strings.Join(said, "\n"):
		default:
		}
	}()
	if why := <-serving; why != "" {
		s.t.Fatal(why)
	}
}

func (s *sidecar) kill() {
	s.command.Process.Kill()
	s.command.Wait()
}

func (s *sidecar) createTopic(topic string, mode pb.DeduplicationMode) {
	s.t.Helper()
	conn, err := grpc.NewClient(s.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		s.t.Fatal(err)
	}
	defer conn.Close()
	request := &pb.CreateTopicRequest{Topic: topic, DeduplicationMode: mode}
	if _, err := pb.NewAdminServiceClient(conn).CreateTopic(s.t.Context(), request); err != nil {
		s.t.Fatal(err)
	}
}

var shared struct {
	sync.Mutex
	sidecar *sidecar
}

// realSidecar returns the sidecar that the tests share. It is never killed.
func realSidecar(t testing.TB) *sidecar {
	python(t)
	shared.Lock()
	defer shared.Unlock()
	if shared.sidecar == nil {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		folder, err := os.MkdirTemp("", "seqdedupe-go-")
		if err != nil {
			t.Fatal(err)
		}
		shared.sidecar = &sidecar{t: t, address: listener.Addr().String(), folder: folder}
		listener.Close()
		shared.sidecar.start()
	}
	one := *shared.sidecar
	one.t = t
	return &one
}

func TestMain(m *testing.M) {
	status := m.Run()
	if shared.sidecar != nil {
		shared.sidecar.kill()
		os.RemoveAll(shared.sidecar.folder)
	}
	os.Exit(status)
}

func newTestClient(t testing.TB, address string) *Client {
	t.Helper()
	c, err := NewClient(address, ClientOptions{Credentials: &Credentials{}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func openProducer(t testing.TB, c *Client, topic, name string, options ProducerOptions) *Producer {
	t.Helper()
	p, err := c.NewProducer(t.Context(), topic, name, options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		done, cancel := context.WithCancel(context.Background())
		cancel()
		p.Close(done)
	})
	return p
}

func must[T any](t testing.TB, value T, err error) T {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	return value
}

// readAll returns the messages that the topic has now.
func readAll(t testing.TB, c *Client, topic string) []ReceivedMessage {
	t.Helper()
	r, err := c.NewReader(topic, ReaderOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var all []ReceivedMessage
	for m, err := range r.All(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, *m)
	}
	return all
}

var topics struct {
	sync.Mutex
	count int
}

func newTopic() string {
	topics.Lock()
	defer topics.Unlock()
	topics.count++
	return fmt.Sprintf("topic-%d", topics.count)
}

// eventually waits for a condition.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	for end := time.Now().Add(2 * time.Minute); !condition(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not after two minutes", what)
		}
	}
}
