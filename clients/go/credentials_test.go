package seqdedupe

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

// An authority issues certificates, as files.
type authority struct {
	t      *testing.T
	folder string
	cert   *x509.Certificate
	key    *ecdsa.PrivateKey
	caFile string
}

func newAuthority(t *testing.T) *authority {
	a := &authority{t: t, folder: t.TempDir()}
	a.caFile, _ = a.issue("ca")
	return a
}

func (a *authority) issue(name string) (certificateFile, keyFile string) {
	key := first(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, BasicConstraintsValid: true, IsCA: a.cert == nil,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	if a.cert == nil {
		a.cert, a.key = template, key
	}
	der := first(x509.CreateCertificate(rand.Reader, template, a.cert, &key.PublicKey, a.key))
	if template.IsCA {
		a.cert = first(x509.ParseCertificate(der))
	}
	write := func(suffix, kind string, der []byte) string {
		path := filepath.Join(a.folder, name+suffix)
		data := pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
		if err := os.WriteFile(path, data, 0o600); err != nil {
			a.t.Fatal(err)
		}
		return path
	}
	return write(".pem", "CERTIFICATE", der), write(".key", "PRIVATE KEY", first(x509.MarshalPKCS8PrivateKey(key)))
}

func TestTLSWithAndWithoutACertificateOfTheClient(t *testing.T) {
	ours, others := newAuthority(t), newAuthority(t)
	certificateFile, keyFile := ours.issue("sidecar")
	pool := x509.NewCertPool()
	pool.AddCert(ours.cert)
	s := &script{t: t, streams: make(chan pb.PublishService_PublishStreamServer, 10)}
	s.persisted(-1)
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(&tls.Config{
		Certificates: []tls.Certificate{first(tls.LoadX509KeyPair(certificateFile, keyFile))},
		ClientCAs:    pool, ClientAuth: tls.RequireAndVerifyClientCert,
	})))
	pb.RegisterPublishServiceServer(server, s)
	listener := first(net.Listen("tcp", "127.0.0.1:0"))
	go server.Serve(listener)
	t.Cleanup(server.Stop)
	open := func(c Credentials) error {
		client := first(NewClient(listener.Addr().String(), ClientOptions{Credentials: &c}))
		defer client.Close()
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		p, err := client.NewProducer(ctx, "t", "p", ProducerOptions{})
		if err == nil {
			p.Close(ctx)
		}
		return err
	}
	certificate, key := ours.issue("client")
	if err := open(Credentials{CAFile: ours.caFile, CertificateFile: certificate, KeyFile: key, Token: "token"}); err != nil {
		t.Error(err)
	}
	if err := open(Credentials{CAFile: others.caFile, CertificateFile: certificate, KeyFile: key}); reasonOf(err) != "TLS_FAILED" {
		t.Error(err)
	}
	for _, c := range []Credentials{{CAFile: ours.caFile}, {}} { // no certificate, no TLS
		if err := open(c); err == nil || !strings.Contains("UNREACHABLE TLS_FAILED", reasonOf(err)) {
			t.Error(err)
		}
	}
}

func TestATokenGoesOnlyWhereItIsSafe(t *testing.T) {
	client := first(NewClient("192.0.2.1:1", ClientOptions{Credentials: &Credentials{Token: "secret"}}))
	if _, err := client.NewProducer(t.Context(), "t", "p", ProducerOptions{}); reasonOf(err) != "INSECURE_ADDRESS" {
		t.Error(err)
	}
	for name, bad := range map[string]Credentials{
		"two":  {Token: "a", TokenFile: "b"},
		"half": {CertificateFile: "a"}, "lines": {Token: "a\nb"}, "gone": {CAFile: "/none"}, "user": {SidecarUser: "no such user"},
	} {
		_, err := NewClient("127.0.0.1:1", ClientOptions{Credentials: &bad})
		if reasonOf(err) != "INVALID_CREDENTIALS" || strings.Contains(err.Error(), "a\nb") {
			t.Error(name, err)
		}
	}
}

func TestAnotherUsersListenerGetsNoToken(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can listen as another user")
	}
	const program = `import socket
s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1], flush=True)
while True: c, _ = s.accept(); print(c.recv(9999), flush=True)`
	try := func(c Credentials) (reason, received string) {
		listening := exec.Command("/usr/bin/env", "python3", "-c", program)
		listening.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 12345, Gid: 12345}}
		listening.Dir = "/"
		pipe := first(listening.StdoutPipe())
		if err := listening.Start(); err != nil {
			t.Skip(err)
		}
		out := bufio.NewReader(pipe)
		port, err := out.ReadString('\n')
		if err != nil {
			t.Skip("no python3 for another user: ", err)
		}
		client := first(NewClient("127.0.0.1:"+strings.TrimSpace(port), ClientOptions{Credentials: &c}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err = client.NewProducer(ctx, "t", "p", ProducerOptions{})
		received = first(out.ReadString('\n'))
		client.Close()
		listening.Process.Kill()
		listening.Wait()
		return reasonOf(err), received
	}
	if reason, received := try(Credentials{Token: "secret"}); reason != "UNTRUSTED_LISTENER" || received != "b''\n" {
		t.Error(reason, received)
	}
	// The control: a listener that is trusted, or a client without a token.
	for _, c := range []Credentials{{Token: "secret", SidecarUser: "12345"}, {}} {
		if reason, received := try(c); reason == "UNTRUSTED_LISTENER" || received == "b''\n" {
			t.Error(reason, received)
		}
	}
}

func TestANamedPipeIsNoCredential(t *testing.T) {
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Skip(err)
	}
	for _, c := range []Credentials{{TokenFile: pipe}, {CAFile: pipe}, {CertificateFile: pipe, KeyFile: pipe}} {
		if err := c.check(); reasonOf(err) != "INVALID_CREDENTIALS" || !strings.Contains(err.Error(), "regular") {
			t.Error(err)
		}
	}
}

func TestTheUserOfTheSidecarIsLookedUpOnce(t *testing.T) {
	c := Credentials{Token: "secret", SidecarUser: "daemon"}
	if err := c.check(); err != nil {
		t.Skip(err)
	}
	c.SidecarUser = "no such user" // as if the users could not be read now
	if number := first(user.Lookup("daemon")).Uid; !c.trustedUsers()[first(strconv.Atoi(number))] {
		t.Error(number)
	}
}

// A fakeConn is a connection to another host.
type fakeConn struct{ net.Conn }

func (fakeConn) LocalAddr() net.Addr  { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 2), Port: 2} }
func (fakeConn) RemoteAddr() net.Addr { return &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1} }

func TestLocalhostAtAnotherHostGetsNoToken(t *testing.T) {
	if err := new(Credentials).checkListener(fakeConn{}); reasonOf(err) != "UNTRUSTED_LISTENER" {
		t.Error(err)
	}
	r := newRoute(&sidecars{addresses: []string{"localhost:1", "localhost:2"}}, "t")
	if before := r.address; !r.movesOn(errorf("UNTRUSTED_LISTENER", "")) || r.address == before {
		t.Error(r.address)
	}
}

func TestAnErrorOfATokenFuncIsNotPrinted(t *testing.T) {
	c := Credentials{TokenFunc: func(context.Context) (string, error) { return "", errors.New("secret") }}
	if _, err := c.token(t.Context()); reasonOf(err) != "CREDENTIALS_UNAVAILABLE" || strings.Contains(err.Error(), "secret") {
		t.Error(err)
	}
}
