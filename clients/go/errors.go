package seqdedupe

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "seqdedupe.dev/go/internal/seqdedupev1"
)

// The kinds of errors. Every [Error] has one of them, for use with [errors.Is].
var (
	// ErrInvalidRequest: the request cannot be carried out, now or later. It changed nothing.
	ErrInvalidRequest = errors.New("invalid request")
	// ErrNotFound: the topic, producer or cursor does not exist.
	ErrNotFound = errors.New("not found")
	// ErrAccessDenied: the caller is unknown, or may not do this.
	ErrAccessDenied = errors.New("access denied")
	// ErrFenced: another process owns the producer name or the cursor. This process must stop using it.
	ErrFenced = errors.New("fenced")
	// ErrUnavailable: not now. Another attempt after [Error.RetryDelay] may succeed.
	ErrUnavailable = errors.New("unavailable")
	// ErrOutcomeUnknown: no answer arrived in time. What was sent may have taken effect, or not.
	ErrOutcomeUnknown = errors.New("outcome unknown")
	// ErrPosition: reading cannot continue from a position without a gap.
	ErrPosition = errors.New("position not readable")
	// ErrDataLoss: acknowledged data is missing or damaged. Find the cause before anything continues.
	ErrDataLoss = errors.New("data loss")
	// ErrConfiguration: an address or the credentials cannot be used.
	ErrConfiguration = errors.New("invalid configuration")
)

// Error is the type of every error of this package, for use with [errors.As]. Only the errors of a caller's own context
// may also be returned as they are.
type Error struct {
	// Reason is a stable upper-case word, listed in docs/reference/errors.md.
	Reason string
	// Message is one line for people.
	Message string
	// RetryDelay is the time after which another attempt may succeed. It is negative if the same request can never
	// succeed.
	RetryDelay time.Duration
	// Details are the numbers of the message, by name.
	Details map[string]string

	kind  error
	cause error
	// tookNone: a publish stream has ended with this error, and the sidecar has taken none of its frames.
	tookNone bool
}

func (e *Error) Error() string { return e.Message + " [" + e.Reason + "]" }

// Unwrap returns the error's kind, such as [ErrFenced], and its cause, if there is one.
func (e *Error) Unwrap() []error {
	if e.cause == nil {
		return []error{e.kind}
	}
	return []error{e.kind, e.cause}
}

const never = -time.Millisecond

// The kinds of reasons that are neither ErrInvalidRequest nor, because a RetryInfo came with them, ErrUnavailable.
var kinds = map[string]error{
	"TOPIC_NOT_FOUND": ErrNotFound, "PRODUCER_NOT_FOUND": ErrNotFound, "CURSOR_NOT_FOUND": ErrNotFound,
	"UNAUTHENTICATED": ErrAccessDenied, "NOT_ALLOWED": ErrAccessDenied,
	"FENCED": ErrFenced, "CURSOR_MOVED": ErrFenced, "OUTCOME_UNKNOWN": ErrOutcomeUnknown,
	"POSITION_TRIMMED": ErrPosition, "POSITION_OF_ANOTHER_INCARNATION": ErrPosition,
	"POSITION_AFTER_END": ErrPosition, "POSITION_DIVERGED": ErrPosition,
	"DATA_LOSS": ErrDataLoss, "LOG_DAMAGED": ErrDataLoss, "ANSWERS_INCONSISTENT": ErrDataLoss, "LOG_GAP": ErrDataLoss,
	"NO_STATE": ErrDataLoss, "STORE_DAMAGED": ErrDataLoss, "STORE_MISSING": ErrDataLoss,
	"NEWER_FORMAT": ErrDataLoss, "OLDER_FORMAT": ErrDataLoss,
	"INVALID_ADDRESS": ErrConfiguration, "INVALID_CREDENTIALS": ErrConfiguration, "INSECURE_ADDRESS": ErrConfiguration,
}

// The delays of the client's own errors after which another attempt may succeed.
var ownDelays = map[string]time.Duration{
	"UNREACHABLE": 100 * time.Millisecond, "NOT_A_SIDECAR": 500 * time.Millisecond, "TLS_FAILED": 500 * time.Millisecond,
	"CREDENTIALS_UNAVAILABLE": 500 * time.Millisecond, "UNTRUSTED_LISTENER": time.Second, "OUTCOME_UNKNOWN": 0,
	"NOT_OWNER": 100 * time.Millisecond, "TOO_MANY_STREAMS": time.Second,
}

func newError(reason string, delay time.Duration, message string, details map[string]string) *Error {
	kind := kinds[reason]
	switch {
	case kind == nil && delay >= 0:
		kind = ErrUnavailable
	case kind == nil:
		kind = ErrInvalidRequest
	}
	message = strings.TrimSuffix(message, " ["+reason+"]")
	return &Error{
		Reason: reason, Message: message, RetryDelay: delay, Details: details, kind: kind,
		tookNone: details["frames_taken"] == "0",
	}
}

// errorf returns an error that the client itself has found.
func errorf(reason, format string, args ...any) *Error {
	delay, ok := ownDelays[reason]
	if !ok {
		delay = never
	}
	return newError(reason, delay, fmt.Sprintf(format, args...), nil)
}

// isTemporary reports whether another attempt may succeed.
func (e *Error) isTemporary() bool { return e.RetryDelay >= 0 }

func (e *Error) with(cause error) *Error {
	e.cause = cause
	return e
}

// ended returns the error of a call whose context has ended before the outcome was known.
func ended(ctx context.Context, what string) *Error {
	return errorf("OUTCOME_UNKNOWN", "%s: %v", what, context.Cause(ctx)).with(ctx.Err())
}

const errorDomain = "seqdedupe"

// asError converts an error of a call to this address.
func asError(err error, address string) *Error {
	var own *Error
	if errors.As(err, &own) {
		return own
	}
	s := status.Convert(err)
	var info *errdetails.ErrorInfo
	delay := time.Duration(never)
	for _, detail := range s.Details() {
		switch d := detail.(type) {
		case *errdetails.ErrorInfo:
			if d.Domain == errorDomain {
				info = d
			}
		case *errdetails.RetryInfo:
			delay = d.RetryDelay.AsDuration()
		}
	}
	if info != nil {
		return newError(info.Reason, delay, s.Message(), info.Metadata)
	}
	switch s.Code() {
	case codes.Unavailable:
		if strings.Contains(s.Message(), "authentication handshake failed") {
			return errorf("TLS_FAILED", "no TLS connection to the sidecar at %s: %s", address, s.Message()).with(err)
		}
		return errorf("UNREACHABLE", "no connection to the sidecar at %s: %s", address, s.Message()).with(err)
	case codes.Aborted, codes.Canceled, codes.DeadlineExceeded, codes.Internal, codes.ResourceExhausted:
	case codes.Unknown:
		if strings.Contains(s.Message(), "unexpected") { // an HTTP status or content type that no gRPC server sends
			return errorf("NOT_A_SIDECAR", "%s does not answer as a sidecar: %s", address, s.Message()).with(err)
		}
	default:
		return errorf("NOT_A_SIDECAR", "%s answered %s without the details that a sidecar sends: %s",
			address, s.Code(), s.Message()).with(err)
	}
	return errorf("OUTCOME_UNKNOWN", "the call to %s broke: %s: %s", address, s.Code(), s.Message()).with(err)
}

// neverSent reports whether it is certain that the call of this error has not reached a sidecar.
func neverSent(e *Error) bool {
	switch e.Reason {
	case "TLS_FAILED", "CREDENTIALS_UNAVAILABLE", "UNTRUSTED_LISTENER":
		return true
	case "UNREACHABLE":
		return strings.Contains(e.Message, "Error while dialing")
	}
	return false
}

func refusalError(r *pb.Refusal) *Error {
	details := map[string]string{}
	for _, p := range r.Producers {
		details["current_epoch"] = strconv.FormatInt(p.CurrentEpoch, 10)
		details["sequence_id"] = strconv.FormatInt(p.SequenceId, 10)
		details["previous_sequence_id"] = strconv.FormatInt(p.PreviousSequenceId, 10)
		details["pushed"] = strconv.FormatInt(p.Pushed, 10)
		details["persisted"] = strconv.FormatInt(p.Persisted, 10)
		if p.ExpectedSequenceId != nil {
			details["expected_sequence_id"] = strconv.FormatInt(*p.ExpectedSequenceId, 10)
		}
	}
	if r.OwnerAddress != "" {
		details[ownerAddress] = r.OwnerAddress
	}
	return newError(r.Reason, time.Duration(r.RetryDelayMs)*time.Millisecond, r.Message, details)
}
