package seqdedupe

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

const (
	maxTokenBytes          = 6 * 1024
	maxCredentialFileBytes = 1024 * 1024
)

// Credentials authenticate the client to its sidecars, and the sidecars to the client. They may combine a token and TLS.
// The zero value has neither.
//
// The client reads the token file, or calls TokenFunc, for each call and stream, and reads the TLS files for each
// connection. So all of them may be replaced at any time. With any TLS file, connections to a host and port use TLS. The
// client sends a token to another host only over TLS (otherwise INSECURE_ADDRESS), and to a port of this machine only if
// a trusted user listens there (otherwise UNTRUSTED_LISTENER).
type Credentials struct {
	// Token is the token itself.
	Token string
	// TokenFunc returns the token.
	TokenFunc func(context.Context) (string, error)
	// TokenFile is a file with one line, the token.
	TokenFile string
	// CAFile has the certificates of the trusted authorities, as PEM. Without it, the system's authorities are trusted.
	CAFile string
	// CertificateFile and KeyFile are the client's certificate and its key, as PEM.
	CertificateFile, KeyFile string
	// AllowInsecureToken lets the client send the token to other hosts without TLS. Set it only if another layer
	// encrypts the connection.
	AllowInsecureToken bool
	// SidecarUser is the user of this machine who runs the sidecar, by name or number. The user of this process, the
	// owner of the token file and root are always trusted.
	SidecarUser string

	sidecarUser int // the number of SidecarUser, which check looks up; -1: none
}

// CredentialsFromEnvironment returns the credentials in SEQDEDUPE_TOKEN, SEQDEDUPE_TOKEN_FILE (by default
// ~/.config/seqdedupe/token, if that file exists), SEQDEDUPE_TLS_CA_FILE, SEQDEDUPE_TLS_CERTIFICATE_FILE,
// SEQDEDUPE_TLS_KEY_FILE, SEQDEDUPE_ALLOW_INSECURE_TOKEN=true and SEQDEDUPE_SIDECAR_USER.
func CredentialsFromEnvironment() Credentials {
	c := Credentials{
		Token:              os.Getenv("SEQDEDUPE_TOKEN"),
		CAFile:             os.Getenv("SEQDEDUPE_TLS_CA_FILE"),
		CertificateFile:    os.Getenv("SEQDEDUPE_TLS_CERTIFICATE_FILE"),
		KeyFile:            os.Getenv("SEQDEDUPE_TLS_KEY_FILE"),
		AllowInsecureToken: strings.EqualFold(os.Getenv("SEQDEDUPE_ALLOW_INSECURE_TOKEN"), "true"),
		SidecarUser:        os.Getenv("SEQDEDUPE_SIDECAR_USER"),
	}
	if c.Token == "" {
		c.TokenFile = os.Getenv("SEQDEDUPE_TOKEN_FILE")
		if home, err := os.UserHomeDir(); c.TokenFile == "" && err == nil {
			usual := filepath.Join(home, ".config", "seqdedupe", "token")
			if _, err := os.Stat(usual); err == nil {
				c.TokenFile = usual
			}
		}
	}
	return c
}

func (c *Credentials) check() error {
	given := 0
	for _, one := range []bool{c.Token != "", c.TokenFunc != nil, c.TokenFile != ""} {
		if one {
			given++
		}
	}
	if given > 1 {
		return errorf("INVALID_CREDENTIALS", "more than one of Token, TokenFunc and TokenFile is given")
	}
	if (c.CertificateFile == "") != (c.KeyFile == "") {
		return errorf("INVALID_CREDENTIALS", "only one of CertificateFile and KeyFile is given")
	}
	if c.TokenFunc == nil && c.hasToken() {
		if _, err := c.token(context.Background()); err != nil {
			return errorf("INVALID_CREDENTIALS", "%v", err).with(err)
		}
	}
	if _, err := c.tlsConfig(); err != nil {
		return errorf("INVALID_CREDENTIALS", "%v", err).with(err)
	}
	c.sidecarUser = -1
	if c.SidecarUser != "" {
		number := c.SidecarUser
		if _, err := strconv.Atoi(number); err != nil {
			found, err := user.Lookup(c.SidecarUser)
			if err != nil {
				return errorf("INVALID_CREDENTIALS", "there is no user %q", c.SidecarUser).with(err)
			}
			number = found.Uid
		}
		c.sidecarUser, _ = strconv.Atoi(number)
	}
	return nil
}

func (c *Credentials) hasToken() bool {
	return c.Token != "" || c.TokenFunc != nil || c.TokenFile != ""
}
func (c *Credentials) hasTLS() bool { return c.CAFile != "" || c.CertificateFile != "" }

// token returns the current token. Errors contain no part of it.
func (c *Credentials) token(ctx context.Context) (string, error) {
	token := c.Token
	if c.TokenFunc != nil {
		var err error
		if token, err = c.TokenFunc(ctx); err != nil {
			return "", errorf("CREDENTIALS_UNAVAILABLE", "the function for the token failed: %T", err).with(err)
		}
	} else if c.TokenFile != "" {
		data, err := readCredential(c.TokenFile)
		if err != nil {
			return "", err
		}
		token = string(data)
	}
	token = strings.TrimSpace(token)
	isPrintable := !strings.ContainsFunc(token, func(r rune) bool { return r < '!' || r > '~' })
	if token == "" || len(token) > maxTokenBytes || !isPrintable {
		return "", errorf("CREDENTIALS_UNAVAILABLE",
			"the token is not one line of 1 to %d printable ASCII letters without blanks", maxTokenBytes)
	}
	return token, nil
}

func readCredential(path string) ([]byte, error) {
	info, err := os.Stat(path)
	// Each connection reads the file again, which a named pipe does not allow.
	if err == nil && (!info.Mode().IsRegular() || info.Size() > maxCredentialFileBytes) {
		err = errors.New("it is no regular file of at most 1 MiB")
	}
	if err != nil {
		return nil, errorf("CREDENTIALS_UNAVAILABLE", "the file %q cannot be read: %v", path, err).with(err)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, errorf("CREDENTIALS_UNAVAILABLE", "the file %q cannot be read: %v", path, err).with(err)
	}
	return data, nil
}

// tlsConfig returns the configuration of a new connection, or nil without TLS.
func (c *Credentials) tlsConfig() (*tls.Config, error) {
	if !c.hasTLS() {
		return nil, nil
	}
	config := &tls.Config{MinVersion: tls.VersionTLS12}
	if c.CAFile != "" {
		data, err := readCredential(c.CAFile)
		if err != nil {
			return nil, err
		}
		config.RootCAs = x509.NewCertPool()
		if !config.RootCAs.AppendCertsFromPEM(data) {
			return nil, errorf("CREDENTIALS_UNAVAILABLE", "the file %q has no certificate", c.CAFile)
		}
	}
	if c.CertificateFile != "" {
		chain, err := readCredential(c.CertificateFile)
		if err != nil {
			return nil, err
		}
		key, err := readCredential(c.KeyFile)
		if err != nil {
			return nil, err
		}
		certificate, err := tls.X509KeyPair(chain, key)
		if err != nil {
			return nil, errorf("CREDENTIALS_UNAVAILABLE", "the client's certificate cannot be used: %v", err).with(err)
		}
		config.Certificates = []tls.Certificate{certificate}
	}
	return config, nil
}

// perRPC shows the token in each call.
type perRPC struct{ *Credentials }

func (perRPC) RequireTransportSecurity() bool { return false } // Client.dial decides this

func (c perRPC) GetRequestMetadata(ctx context.Context, _ ...string) (map[string]string, error) {
	token, err := c.token(ctx)
	if err != nil {
		e := asError(err, "")
		s, _ := status.New(codes.Unauthenticated, e.Message).WithDetails(
			&errdetails.ErrorInfo{Reason: e.Reason, Domain: errorDomain},
			&errdetails.RetryInfo{RetryDelay: durationpb.New(e.RetryDelay)})
		return nil, s.Err()
	}
	return map[string]string{"authorization": "Bearer " + token}, nil
}

const (
	// stranger is the number that the kernel reports for every user outside the user namespace of this process.
	stranger = 65_534
	allUsers = 1<<32 - 1
)

// trustedUsers returns the users of this machine to whom the client may send the token.
func (c *Credentials) trustedUsers() map[int]bool {
	users := map[int]bool{0: true, os.Geteuid(): true}
	if c.sidecarUser >= 0 {
		users[c.sidecarUser] = true
	}
	if info, err := os.Stat(c.TokenFile); c.TokenFile != "" && err == nil {
		if owner, ok := info.Sys().(*syscall.Stat_t); ok {
			users[int(owner.Uid)] = true
		}
	}
	if data, err := os.ReadFile("/proc/self/uid_map"); err == nil {
		known := 0
		for line := range strings.Lines(string(data)) {
			if fields := strings.Fields(line); len(fields) == 3 {
				count, _ := strconv.Atoi(fields[2])
				known += count
			}
		}
		if known < allUsers {
			delete(users, stranger)
		}
	}
	return users
}

// checkListener returns UNTRUSTED_LISTENER if a user who is not trusted has the other end of this connection to a port
// of this machine, or listens at that port: while the sidecar is down, any user may listen there. Without Linux's tables
// of sockets, it does nothing.
func (c *Credentials) checkListener(conn net.Conn) error {
	trusted := c.trustedUsers()
	there, here := addrPort(conn.RemoteAddr()), addrPort(conn.LocalAddr())
	if !there.Addr().IsLoopback() { // the name localhost may have any address
		return errorf("UNTRUSTED_LISTENER", "%s is not an address of this machine only: the token was not sent there", there)
	}
	// The listener first: while the connection is not accepted yet, the listener owns it.
	for _, wanted := range []func(local, remote netip.AddrPort, listens bool) bool{
		func(local, _ netip.AddrPort, listens bool) bool {
			return listens && local.Port() == there.Port() && (local.Addr() == there.Addr() || local.Addr().IsUnspecified())
		},
		func(local, remote netip.AddrPort, listens bool) bool {
			return !listens && local == there && remote == here
		},
	} {
		for _, table := range []string{"/proc/self/net/tcp", "/proc/self/net/tcp6"} {
			for _, owner := range owners(table, wanted) {
				if !trusted[owner] {
					return errorf("UNTRUSTED_LISTENER", "user %d listens at %s: the token was not sent there", owner, there)
				}
			}
		}
	}
	return nil
}

func addrPort(address net.Addr) netip.AddrPort {
	found, _ := netip.ParseAddrPort(address.String())
	return netip.AddrPortFrom(found.Addr().Unmap().WithZone(""), found.Port())
}

// owners returns the users of the sockets in a table of /proc (proc_pid_net(5)) that are wanted.
func owners(path string, wanted func(local, remote netip.AddrPort, listens bool) bool) []int {
	table, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer table.Close()
	var found []int
	for lines := bufio.NewScanner(table); lines.Scan(); {
		fields := strings.Fields(lines.Text())
		if len(fields) < 8 {
			continue
		}
		local, remote := tablePlace(fields[1]), tablePlace(fields[2])
		if owner, err := strconv.Atoi(fields[7]); err == nil && wanted(local, remote, fields[3] == "0A") {
			found = append(found, owner)
		}
	}
	return found
}

// tablePlace parses an address, in words of the machine's byte order, and a port.
func tablePlace(text string) netip.AddrPort {
	host, port, _ := strings.Cut(text, ":")
	words, err := hex.DecodeString(host)
	if err != nil {
		return netip.AddrPort{}
	}
	for i := 0; i+4 <= len(words); i += 4 {
		binary.BigEndian.PutUint32(words[i:], binary.NativeEndian.Uint32(words[i:]))
	}
	address, _ := netip.AddrFromSlice(words)
	number, _ := strconv.ParseUint(port, 16, 16)
	return netip.AddrPortFrom(address.Unmap(), uint16(number))
}
