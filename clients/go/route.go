package seqdedupe

import (
	"cmp"
	"crypto/sha256"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// sidecars are the sidecars in front of one log: the addresses that the client tries, and the domains to whose hosts a
// sidecar may redirect the client.
type sidecars struct {
	addresses []string
	domains   []string
}

var (
	hostName = regexp.MustCompile(`^[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*$`)
	numeric  = regexp.MustCompile(`^[0-9]+$`)
)

const unixPrefix = "unix:"

// parseAddress returns the address in its usual form, in which two addresses are compared.
func parseAddress(text string) (string, error) {
	bad := errorf("INVALID_ADDRESS", "%q is not a sidecar's address: it should be host:port or unix:/path", text)
	if path, isUnix := strings.CutPrefix(text, unixPrefix); isUnix {
		if strings.Trim(path, "/") == "" {
			return "", bad
		}
		if strings.HasPrefix(path, "///") {
			path = path[2:]
		}
		return unixPrefix + path, nil
	}
	colon := strings.LastIndexByte(text, ':')
	if colon <= 0 {
		return "", bad
	}
	host, port := text[:colon], text[colon+1:]
	bracketed := strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]")
	number, err := strconv.ParseUint(port, 10, 16)
	if err != nil || (strings.ContainsAny(host, ":/") && !bracketed) {
		return "", bad
	}
	return strings.ToLower(host) + ":" + strconv.FormatUint(number, 10), nil
}

func hostOf(address string) string {
	return strings.Trim(address[:strings.LastIndexByte(address, ':')], "[]")
}

// isLocal reports whether only this machine can reach the address.
func isLocal(address string) bool {
	if strings.HasPrefix(address, unixPrefix) || hostOf(address) == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(hostOf(address))
	return err == nil && ip.IsLoopback()
}

func parseSidecars(given string) (sidecars, error) {
	var s sidecars
	for text := range strings.SplitSeq(given, ",") {
		text = strings.TrimSpace(text)
		if domain, ok := strings.CutPrefix(text, "*."); ok {
			domain = strings.ToLower(domain)
			if !hostName.MatchString(domain) || numeric.MatchString(domain[strings.LastIndexByte(domain, '.')+1:]) {
				return s, errorf("INVALID_ADDRESS", "%q is not a domain: it should be like *.example.org", text)
			}
			s.domains = append(s.domains, domain)
			continue
		}
		address, err := parseAddress(text)
		if err != nil {
			return s, err
		}
		if !slices.Contains(s.addresses, address) {
			s.addresses = append(s.addresses, address)
		}
	}
	if len(s.addresses) == 0 {
		return s, errorf("INVALID_ADDRESS", "%q contains no sidecar's address", given)
	}
	return s, nil
}

func (s *sidecars) isOne() bool { return len(s.addresses) == 1 && len(s.domains) == 0 }

// inOrder returns the addresses in the order in which every client tries them for this topic.
func (s *sidecars) inOrder(topic string) []string {
	if topic == "" {
		return s.addresses
	}
	weight := func(address string) string {
		sum := sha256.Sum256([]byte(topic + "\n" + address))
		return string(sum[:8])
	}
	order := slices.Clone(s.addresses)
	slices.SortStableFunc(order, func(a, b string) int { return strings.Compare(weight(b), weight(a)) })
	return order
}

// allowed returns the address to which a sidecar redirects, or "": the client sends its credentials there, so it goes
// only to addresses and domains that it was given.
func (s *sidecars) allowed(text string) string {
	address, err := parseAddress(text)
	if err != nil {
		return ""
	}
	if slices.Contains(s.addresses, address) {
		return address
	}
	if strings.HasPrefix(address, unixPrefix) || !hostName.MatchString(hostOf(address)) {
		return ""
	}
	for _, domain := range s.domains {
		if strings.HasSuffix(hostOf(address), "."+domain) {
			return address
		}
	}
	return ""
}

const (
	ownerAddress = "owner_address"
	// maxRedirects is the number of redirects that the client follows in a round.
	maxRedirects = 5
	// maxReturns is the number of times, until a success, that the client returns to a sidecar that another sidecar
	// names as the owner: the topic is moving between the two.
	maxReturns = 5
	// longestRefusal is the time of errors that may last (see mayLast) after which the client asks every other sidecar
	// once before it waits for the same sidecar again. A recovery usually takes less time.
	longestRefusal = 10 * time.Second
	// longestGap is the time without an error after which the next one begins anew: the client was idle.
	longestGap = 60 * time.Second
)

// A route is the sidecar to ask now for a topic. The client asks all sidecars once in a round. If a sidecar names the
// owner, the client asks the owner next. After a round, the client waits. It is not safe for concurrent use.
type route struct {
	sidecars    *sidecars
	order       []string
	address     string
	asked       map[string]*Error // the sidecars of this round, and their errors
	unknownTo   map[string]bool   // since the last success
	newest      string            // the sidecar with the highest term so far
	older       map[string]bool   // the sidecars with a lower term, since the last answer of newest
	redirects   int
	returns     int
	refusedAt   time.Time // the first error that may last since the last success, or a gap
	refusedLast time.Time // the last such error
	waitedAt    string    // the sidecar whose errors lasted, in a round that this began
	over        bool
}

func newRoute(s *sidecars, topic string) *route {
	order := s.inOrder(topic)
	r := &route{sidecars: s, order: order, address: order[0], unknownTo: map[string]bool{}, older: map[string]bool{}}
	r.beginRound()
	return r
}

func (r *route) beginRound() {
	r.asked, r.redirects, r.over = map[string]*Error{}, 0, false
	if r.waitedAt != "" {
		r.waitedAt, r.refusedAt = "", time.Time{}
	}
}

// passes reports whether this error usually passes soon, because a topic is moving.
func passes(e *Error) bool { return e.Reason == "NOT_OWNER" || e.Reason == "DRAINING" }

// movesOn handles an error of the sidecar at address. It reports whether address is now another sidecar, which the
// caller asks at once. Otherwise the caller waits first.
func (r *route) movesOn(why *Error) bool {
	if r.over {
		r.beginRound()
	}
	r.asked[r.address] = why
	switch why.Reason {
	case "NOT_OWNER", "DRAINING", "UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR", "OUTCOME_UNKNOWN",
		"UNTRUSTED_LISTENER":
	default:
		if !r.hasLasted(why) {
			r.over = true
			return false
		}
		if r.waitedAt == "" {
			r.waitedAt = r.address
		}
	}
	owner := ""
	if why.Reason == "NOT_OWNER" {
		owner = r.sidecars.allowed(why.Details[ownerAddress])
	}
	if said := r.asked[owner]; said != nil && owner != r.address && passes(said) && r.returns < maxReturns {
		r.returns++
		r.over, r.address = true, owner
		return false
	}
	r.address, r.over = r.following(owner)
	return !r.over
}

// mayLast reports whether the client waits because of this error, although another sidecar may serve the topic.
func mayLast(e *Error) bool {
	switch e.Reason {
	case "RECOVERING", "LOG_REFUSED", "LOG_UNREADABLE", "STORE_UNAVAILABLE", "TOO_MANY_STREAMS":
		return true
	}
	return false
}

// hasLasted reports whether the client has waited long enough at address because of this error, of a call or a frame:
// the next step is movesOn, which asks other sidecars.
func (r *route) hasLasted(why *Error) bool {
	if !mayLast(why) || r.sidecars.isOne() {
		return false
	}
	now := time.Now()
	if r.refusedAt.IsZero() || now.Sub(r.refusedLast) > longestGap {
		r.refusedAt = now
	}
	r.refusedLast = now
	return now.Sub(r.refusedAt) >= longestRefusal
}

func (r *route) following(owner string) (address string, over bool) {
	if owner != "" && r.asked[owner] == nil && r.redirects < maxRedirects {
		r.redirects++
		return owner, false
	}
	for _, address := range r.order {
		if r.asked[address] == nil {
			return address, false
		}
	}
	return cmp.Or(r.waitedAt, r.order[0]), true
}

// doubted converts an error of the sidecar at address: a topic that one sidecar does not know may be moving to it. The
// error counts when all sidecars have returned it.
func (r *route) doubted(e *Error) *Error {
	if (e.Reason != "TOPIC_NOT_FOUND" && e.Reason != "NO_STATE") || r.sidecars.isOne() || e.Details["shard"] != "" {
		return e
	}
	r.unknownTo[r.address] = true
	for _, address := range r.order {
		if !r.unknownTo[address] {
			return errorf("NOT_OWNER", "%s", e.Message)
		}
	}
	return e
}

// checkTerm records the term in an answer of the sidecar at address; highest is the highest term of earlier answers. It
// reports whether the topic's history was replaced: all listed sidecars, and the sidecar that had the highest term (it
// may be in a domain), answer with a lower term. If only some do, it returns the error of a former owner.
func (r *route) checkTerm(term, highest int64) (bool, *Error) {
	if term >= highest {
		r.newest = r.address
		clear(r.older)
		return false, nil
	}
	r.older[r.address] = true
	for _, address := range append([]string{r.newest}, r.order...) {
		if !r.older[address] {
			return false, r.formerOwner(term, highest)
		}
	}
	return true, nil
}

// formerOwner returns the error for an answer of a former owner. It names the sidecar with the highest term.
func (r *route) formerOwner(term, highest int64) *Error {
	e := errorf("NOT_OWNER", "the sidecar at %s answers with term %d, lower than %d before", r.address, term, highest)
	e.Details = map[string]string{ownerAddress: r.newest}
	return e
}

// believed converts the refusal of a frame, which has come with this term. If a former owner refuses a frame for good,
// the sidecar with the highest term decides. A sidecar without the topic's state answers with the term 0.
func (r *route) believed(e *Error, term, highest int64) *Error {
	if !e.isTemporary() && 0 < term && term < highest && r.address != r.newest {
		return r.formerOwner(term, highest)
	}
	return r.doubted(e)
}

// passing reports whether a sidecar asked in this round has returned an error that usually passes soon.
func (r *route) passing() bool {
	for _, e := range r.asked {
		if e.Reason == "RECOVERING" || passes(e) && !r.sidecars.isOne() {
			return true
		}
	}
	return false
}

// goesWell records a successful call to the sidecar at address.
func (r *route) goesWell() {
	r.refusedAt = time.Time{}
	if len(r.asked) == 0 && len(r.unknownTo) == 0 {
		return
	}
	clear(r.unknownTo)
	r.returns = 0
	r.beginRound()
}
