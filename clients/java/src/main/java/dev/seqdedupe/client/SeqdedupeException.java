package dev.seqdedupe.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import com.google.rpc.Status;
import io.grpc.StatusException;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.seqdedupe.v1.ProducerRefusal;
import io.seqdedupe.v1.Refusal;
import java.io.IOException;
import java.io.InputStream;
import java.io.InputStreamReader;
import java.io.UncheckedIOException;
import java.net.ConnectException;
import java.net.UnknownHostException;
import java.nio.charset.StandardCharsets;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.Properties;
import javax.net.ssl.SSLException;

/**
 * The base class of all errors of this client. Each error has a stable {@link #reason()}, which the page
 * docs/reference/errors.md lists, a message for people, and a {@link #hint()} with the next step.
 */
public class SeqdedupeException extends RuntimeException {
    private static final long serialVersionUID = 1;
    private static final String DOMAIN = "seqdedupe";
    private static final Properties REASONS = reasons();
    static final long NEVER = -1;

    private final String reason;
    private final String hint;
    private final long retryDelayMs;
    private final transient Map<String, String> details;

    private SeqdedupeException(Builder b) {
        super(b.message + " [" + b.reason + "]");
        reason = b.reason;
        hint = b.hint;
        retryDelayMs = b.retryDelayMs;
        details = b.details;
    }

    /** Returns the stable upper-case word of this error. */
    public String reason() {
        return reason;
    }

    /** Returns the next step. */
    public String hint() {
        return hint;
    }

    /** Returns the time in milliseconds after which another attempt may succeed; -1 if it can never succeed. */
    public long retryDelayMs() {
        return retryDelayMs;
    }

    /** Returns the numbers of the message, by name. */
    public Map<String, String> details() {
        return details == null ? Map.of() : details;
    }

    boolean isTemporary() {
        return retryDelayMs >= 0;
    }

    boolean is(String... reasons) {
        return java.util.Arrays.asList(reasons).contains(reason);
    }

    /** Whether the connection is lost or silent, so that another connection may help. */
    boolean isOfConnection() {
        return is("UNREACHABLE", "TLS_FAILED", "NOT_A_SIDECAR", "OUTCOME_UNKNOWN", "UNTRUSTED_LISTENER");
    }

    /** Whether it is certain that the call has not reached a sidecar. */
    boolean isOfUnsentCall() {
        return is("TLS_FAILED", "CREDENTIALS_UNAVAILABLE", "UNTRUSTED_LISTENER")
                || (is("UNREACHABLE") && (hasCause(this, ConnectException.class) || hasCause(this, UnknownHostException.class)));
    }

    SeqdedupeException because(Throwable cause) {
        if (cause != null && getCause() == null && cause != this) {
            initCause(cause);
        }
        return this;
    }

    /** Returns the same error with the stack of the calling thread. */
    SeqdedupeException again() {
        String message = getMessage().substring(0, getMessage().length() - reason.length() - 3);
        return new Builder(reason, message, retryDelayMs, hint, details()).build().because(this);
    }

    /** The request cannot be carried out, now or later. It changed nothing. */
    public static class InvalidRequest extends SeqdedupeException {
        private static final long serialVersionUID = 1;

        private InvalidRequest(Builder b) {
            super(b);
        }
    }

    /** The topic, producer or cursor does not exist. */
    public static final class NotFound extends InvalidRequest {
        private static final long serialVersionUID = 1;

        private NotFound(Builder b) {
            super(b);
        }
    }

    /** The caller is unknown, or may not do this. The request changed nothing. */
    public static final class AccessDenied extends SeqdedupeException {
        private static final long serialVersionUID = 1;

        private AccessDenied(Builder b) {
            super(b);
        }
    }

    /** Another process owns the producer name or the cursor. This process must stop using it. */
    public static final class Fenced extends SeqdedupeException {
        private static final long serialVersionUID = 1;

        private Fenced(Builder b) {
            super(b);
        }
    }

    /** The request cannot be carried out now. Another attempt after {@link #retryDelayMs()} may succeed. */
    public static class Unavailable extends SeqdedupeException {
        private static final long serialVersionUID = 1;

        private Unavailable(Builder b) {
            super(b);
        }
    }

    /** No answer arrived in time, or the connection was lost. What was sent may have taken effect, or not. */
    public static final class OutcomeUnknown extends Unavailable {
        private static final long serialVersionUID = 1;

        private OutcomeUnknown(Builder b) {
            super(b);
        }
    }

    /** Reading cannot continue from this position without a gap. */
    public static final class PositionLost extends SeqdedupeException {
        private static final long serialVersionUID = 1;

        private PositionLost(Builder b) {
            super(b);
        }
    }

    /** Acknowledged data is missing or damaged. Find the cause before anything continues. */
    public static final class DataLoss extends SeqdedupeException {
        private static final long serialVersionUID = 1;

        private DataLoss(Builder b) {
            super(b);
        }
    }

    /** An address or the credentials cannot be used. */
    public static final class Configuration extends SeqdedupeException {
        private static final long serialVersionUID = 1;

        private Configuration(Builder b) {
            super(b);
        }
    }

    private record Builder(String reason, String message, long retryDelayMs, String hint, Map<String, String> details) {
        SeqdedupeException build() {
            String row = REASONS.getProperty(reason);
            String kind = row != null ? row.substring(0, row.indexOf(' ')) : retryDelayMs >= 0 ? "Unavailable" : "";
            return switch (kind) {
                case "InvalidRequest" -> new InvalidRequest(this);
                case "NotFound" -> new NotFound(this);
                case "AccessDenied" -> new AccessDenied(this);
                case "Fenced" -> new Fenced(this);
                case "Unavailable" -> new Unavailable(this);
                case "OutcomeUnknown" -> new OutcomeUnknown(this);
                case "Position" -> new PositionLost(this);
                case "DataLoss", "Damaged" -> new DataLoss(this);
                case "Configuration" -> new Configuration(this);
                default -> new SeqdedupeException(this);
            };
        }
    }

    private static Properties reasons() {
        Properties rows = new Properties();
        try (InputStream in = SeqdedupeException.class.getResourceAsStream("reasons.properties")) {
            rows.load(new InputStreamReader(in, StandardCharsets.UTF_8));
        } catch (IOException e) {
            throw new UncheckedIOException(e);
        }
        return rows;
    }

    /** Returns an error that the client itself has found. */
    static SeqdedupeException of(String reason, String format, Object... args) {
        String[] row = REASONS.getProperty(reason).split(" ", 3);
        return new Builder(reason, String.format(format, args), Long.parseLong(row[1]), row[2], Map.of()).build();
    }

    static SeqdedupeException of(String reason, long retryDelayMs, String message, Map<String, String> details) {
        String suffix = " [" + reason + "]";
        String text = message.endsWith(suffix) ? message.substring(0, message.length() - suffix.length()) : message;
        String row = REASONS.getProperty(reason);
        String hint = row == null ? "See the sidecar's list of errors." : row.split(" ", 3)[2];
        return new Builder(reason, text, retryDelayMs, details.getOrDefault("hint", hint), details).build();
    }

    static SeqdedupeException of(Refusal refusal) {
        Map<String, String> details = new LinkedHashMap<>();
        for (ProducerRefusal p : refusal.getProducersList()) {
            details.put("epoch", "" + p.getEpoch());
            details.put("current_epoch", "" + p.getCurrentEpoch());
            details.put("sequence_id", "" + p.getSequenceId());
            details.put("previous_sequence_id", "" + p.getPreviousSequenceId());
            details.put("pushed", "" + p.getPushed());
            details.put("persisted", "" + p.getPersisted());
            if (p.hasExpectedSequenceId()) {
                details.put("expected_sequence_id", "" + p.getExpectedSequenceId());
            }
        }
        if (!refusal.getOwnerAddress().isEmpty()) {
            details.put(Route.OWNER_ADDRESS, refusal.getOwnerAddress());
        }
        return of(refusal.getReason(), refusal.getRetryDelayMs(), refusal.getMessage(), details);
    }

    /** Converts the failure of a call to this address. A failure that no call has is a defect: INTERNAL. */
    static SeqdedupeException of(Throwable failure, String address) {
        for (Throwable t = failure; t != null; t = t.getCause()) {
            if (t instanceof SeqdedupeException own) {
                return own;
            }
        }
        if (!hasCause(failure, StatusRuntimeException.class) && !hasCause(failure, StatusException.class)) {
            return of("INTERNAL", "a defect in the client: %s", failure).because(failure);
        }
        SeqdedupeException said = ofSidecar(failure);
        return said != null ? said : ofGrpc(io.grpc.Status.fromThrowable(failure), address).because(failure);
    }

    /** Converts the end of a stream. A status without a sidecar's reason is never final. */
    static SeqdedupeException ofStream(StatusRuntimeException failure, String address) {
        SeqdedupeException e = of(failure, address);
        return e.is("MESSAGE_TOO_LARGE") && ofSidecar(failure) == null
                ? of("OUTCOME_UNKNOWN", "the stream to %s broke: %s", address, e.getMessage()).because(failure)
                : e;
    }

    private static SeqdedupeException ofSidecar(Throwable failure) {
        ErrorInfo info = null;
        long delay = NEVER;
        try {
            Status status = StatusProto.fromThrowable(failure);
            if (status == null) {
                return null;
            }
            for (Any detail : status.getDetailsList()) {
                if (detail.is(ErrorInfo.class) && detail.unpack(ErrorInfo.class).getDomain().equals(DOMAIN)) {
                    info = detail.unpack(ErrorInfo.class);
                } else if (detail.is(RetryInfo.class)) {
                    var wait = detail.unpack(RetryInfo.class).getRetryDelay();
                    delay = wait.getSeconds() * 1000 + wait.getNanos() / 1_000_000;
                }
            }
            return info == null ? null : of(info.getReason(), delay, status.getMessage(), info.getMetadataMap());
        } catch (InvalidProtocolBufferException | IllegalArgumentException e) {
            return null; // a proxy that answers for the sidecar may send anything
        }
    }

    private static SeqdedupeException ofGrpc(io.grpc.Status status, String address) {
        String said = String.valueOf(status.getDescription());
        switch (status.getCode()) {
            case UNAVAILABLE:
                if (hasCause(status.getCause(), SSLException.class)) {
                    return of("TLS_FAILED", "no TLS connection to the sidecar at %s: %s", address, status.getCause());
                }
                return of("UNREACHABLE", "no connection to the sidecar at %s: %s", address, said);
            case ABORTED, CANCELLED, DEADLINE_EXCEEDED, INTERNAL, UNKNOWN:
                if (!said.contains("HTTP status code")) {
                    String what = status.getCode() + ": " + said;
                    return of("OUTCOME_UNKNOWN", "the call to %s broke: %s", address, what);
                }
                break;
            case RESOURCE_EXHAUSTED:
                if (said.contains("exceeds maximum size")) {
                    return of("MESSAGE_TOO_LARGE", "a message to or from %s: %s", address, said);
                }
                break;
            default:
        }
        String what = address + " answered " + status.getCode();
        return of("NOT_A_SIDECAR", "%s without the details that a sidecar sends: %s", what, said);
    }

    private static boolean hasCause(Throwable failure, Class<?> kind) {
        for (Throwable t = failure; t != null; t = t.getCause()) {
            if (kind.isInstance(t)) {
                return true;
            }
        }
        return false;
    }
}
