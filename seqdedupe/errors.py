"""Every error of this project, in one tree.

    SeqdedupeError
    ├── InvalidRequestError     the request cannot be carried out, now or later
    │   └── NotFoundError
    ├── AccessDeniedError       the caller is unknown, or may not do this
    ├── FencedError             another process owns the producer name
    ├── UnavailableError        not now: trying again helps
    │   └── OutcomeUnknownError     the messages sent may be in the log or not
    ├── PositionError           reading cannot continue from a reader's position
    ├── DataLossError           acknowledged data is missing
    │   └── DamagedError            a file is damaged, incomplete or of a newer version
    └── ConfigurationError      the sidecar or a command has an invalid configuration or option

An error has a stable `reason`, one line for a person, a `hint` with the next step, and the numbers that a person
needs. `docs/reference/errors.md` lists the reasons; a test compares that list with `REASONS`.
"""

from dataclasses import dataclass

NEVER = -1
"""As a retry delay: the same request can never succeed."""

EXIT_FAILED = 1
"""Exit status of a process that an error has ended: another attempt may succeed."""

EXIT_WRONG = 2
"""Exit status of every command and of the sidecar after wrong usage or a wrong configuration: another attempt fails."""


class SeqdedupeError(Exception):
    """The root of the tree. `error()` makes it, and looks the reason up.

    Attributes: `reason`, a stable upper-case word; `hint`, the next step; `retry_delay_ms`, after which another attempt
    may help, or NEVER; `numbers`, by name, as text.
    """

    def __init__(self, reason: str, message: str, hint: str, retry_delay_ms: int, numbers: dict[str, str]) -> None:
        super().__init__(message)
        # The hint is shown below the error in a traceback, which may be all that the user of a library sees.
        self.add_note(hint)
        self.reason = reason
        self.message = message
        self.hint = hint
        self.retry_delay_ms = retry_delay_ms
        self.numbers = numbers

    def __str__(self) -> str:
        return f"{self.message} [{self.reason}]"

    def __reduce__(self) -> tuple[type, tuple[str, str, str, int, dict[str, str]]]:
        return type(self), (self.reason, self.message, self.hint, self.retry_delay_ms, self.numbers)


class InvalidRequestError(SeqdedupeError):
    """The request cannot be carried out, now or later. It changed nothing."""


class NotFoundError(InvalidRequestError):
    """The topic or producer does not exist."""


class AccessDeniedError(SeqdedupeError):
    """The caller is unknown, or may not do this. It changed nothing."""


class FencedError(SeqdedupeError):
    """Another process owns the producer name. This one must stop using it."""


class UnavailableError(SeqdedupeError):
    """Not now. Trying again after `retry_delay_ms` helps."""


class OutcomeUnknownError(UnavailableError):
    """The connection was lost, or a time limit reached: the messages may be in the log or not."""


class PositionError(SeqdedupeError):
    """Reading cannot continue from this position: some messages between it and the remaining ones may be missing."""


class DataLossError(SeqdedupeError):
    """Acknowledged data is missing. Nothing continues automatically."""


class DamagedError(DataLossError):
    """A file is damaged, incomplete or of a newer version. Nothing was changed."""


class ConfigurationError(SeqdedupeError):
    """The sidecar or a command has an invalid configuration or option."""


@dataclass(frozen=True)
class Reason:
    """The properties of a reason: the class, the gRPC status code, the hint, the usual retry delay."""

    kind: type[SeqdedupeError]
    code: str
    hint: str
    retry_delay_ms: int = NEVER


def _invalid(hint: str) -> Reason:
    return Reason(InvalidRequestError, "INVALID_ARGUMENT", hint)


def _damaged(hint: str) -> Reason:
    return Reason(DamagedError, "DATA_LOSS", hint)


def _configuration(hint: str) -> Reason:
    return Reason(ConfigurationError, "FAILED_PRECONDITION", hint)


REASONS: dict[str, Reason] = {
    # The request.
    "MALFORMED_MESSAGE": _invalid("Send the message that the published schema describes."),
    "INVALID_TOPIC_NAME": _invalid("Write the topic as persistent://TENANT/NAMESPACE/NAME, or use a short name."),
    "INVALID_NAMESPACE": _invalid("Write the namespace as TENANT/NAMESPACE, for example public/default."),
    "INVALID_NAME": _invalid(
        "Give every producer a name of 1 to 255 bytes of UTF-8 without control characters, each once in a request."
    ),
    "INVALID_BATCH": _invalid("Lay the batch's columns out as Batch in batch.proto says."),
    "INVALID_SEQUENCE_ID": _invalid("Use sequence IDs from 0 to 2^63 - 1."),
    "INVALID_DEDUPLICATION_ID": _invalid("Give every message a deduplication ID of 1 to 255 bytes."),
    "NOT_ASCENDING": _invalid("Sort each producer's sequence IDs within a batch, and send each only once."),
    "INVALID_PREDECESSOR": _invalid(
        "Link to the highest ID below the batch's first one that was sent in this session or that Open answered."
    ),
    "LINK_REQUIRED": _invalid("Set the previous sequence ID: only a lone unary call may omit it."),
    "INVALID_EPOCH": _invalid("Use the epoch that Open answered for this topic and name."),
    "INVALID_REQUEST": _invalid("Correct what the message names."),
    "UNKNOWN_CALL": Reason(
        InvalidRequestError,
        "UNIMPLEMENTED",
        "Producers and readers need a sidecar with log = embedded or pulsar, brokers one with log = broker. If the "
        "sidecar has that and is older than the client, upgrade it.",
    ),
    "INVALID_POSITION": _invalid("Give a position that this sidecar answered, or an index from 0 up."),
    "MESSAGE_TOO_LARGE": _invalid("Send less in one message; the error names the limit."),
    "BATCH_TOO_LARGE": _invalid("Split the batch. If it is one message, send less in it; the error names the limit."),
    "TOPIC_NOT_FOUND": Reason(
        NotFoundError,
        "NOT_FOUND",
        "Is the name mistyped? `seqdedupe topics` lists the topics. To publish to a new topic, create it, or set "
        "allow_auto_topic_creation = true. A topic of deduplication IDs must be created: "
        "`seqdedupe topics create --deduplication-mode deduplication-id`.",
    ),
    "TOPIC_EXISTS": Reason(InvalidRequestError, "ALREADY_EXISTS", "Use the topic that is there, or another name."),
    "TOPIC_IS_PARTITIONED": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Name one of its partitions, `name-partition-0` and on. Python's producers take the name of the whole topic, "
        "and `partitioned_reader` reads it.",
    ),
    "TOPIC_TERMINATED": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Publish to another topic; this one stays readable. Or delete it, and create it again.",
    ),
    "TOPIC_IN_USE": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Import into a topic that was just created, before its producers open it or anything is published.",
    ),
    "LOG_INCOMPLETE": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Keep the store's records, or import a saved snapshot.",
    ),
    "PRODUCER_NOT_FOUND": Reason(
        NotFoundError, "NOT_FOUND", "Is the name mistyped? `seqdedupe producers TOPIC` lists the producers."
    ),
    "CURSOR_NOT_FOUND": Reason(
        NotFoundError, "NOT_FOUND", "Is the name mistyped? `seqdedupe cursors TOPIC` lists the cursors."
    ),
    "TOO_MANY_CURSORS": Reason(
        InvalidRequestError,
        "RESOURCE_EXHAUSTED",
        "Remove cursors that nobody needs (`seqdedupe cursors TOPIC --remove NAME`), or keep positions in files.",
    ),
    "SIDECAR_NOT_FOUND": Reason(
        NotFoundError,
        "NOT_FOUND",
        "Is the name mistyped, or the sidecar forgotten already? `seqdedupe sidecars` lists the names.",
    ),
    "SIDECAR_ALIVE": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Stop the sidecar first. If it is to stay, it needs its subscriptions, which keep what its snapshots do not "
        "cover.",
    ),
    "TOO_MANY_TOPICS": Reason(
        InvalidRequestError, "RESOURCE_EXHAUSTED", "Delete topics that nobody needs, or raise max_topics."
    ),
    # Access.
    "UNAUTHENTICATED": Reason(
        AccessDeniedError,
        "UNAUTHENTICATED",
        "Send the sidecar's token: SEQDEDUPE_TOKEN, or SEQDEDUPE_TOKEN_FILE with the path of the file `token` in its "
        "data directory. See docs/guides/security.md.",
    ),
    "NOT_ALLOWED": Reason(
        AccessDeniedError,
        "PERMISSION_DENIED",
        "Ask the sidecar's operator for a rule. `seqdedupe auth explain` names the rule that decides.",
    ),
    "TOKEN_EXPIRED": Reason(UnavailableError, "UNAUTHENTICATED", "Send a token that is still valid.", 0),
    # Sessions and order.
    "FENCED": Reason(
        FencedError,
        "FAILED_PRECONDITION",
        "Another process opened this producer name later, or an operator has reset it. Stop this process, or give its "
        "producer another name.",
    ),
    "PRODUCER_BUSY": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Give each producer of a topic a name of its own. Wait until the other producer has closed.",
        1000,
    ),
    "CONSUMER_BUSY": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Give each consumer its own subscription, or use the type Failover for all consumers of this one.",
        1000,
    ),
    "PREDECESSOR_MISSING": Reason(
        UnavailableError, "FAILED_PRECONDITION", "Resend from the first message without a receipt.", 0
    ),
    "GAP": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Send what is missing, in order. If nothing is missing, allow gaps (`seqdedupe policy set TOPIC --gap allow`), "
        "and open the producer again.",
    ),
    "OVERLAP": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Split the range after the highest persisted ID, or let the topic's policy answer as Pulsar does.",
    ),
    "REPLAY_GAP": Reason(
        DataLossError,
        "FAILED_PRECONDITION",
        "Replay every entry after `Attached.replay_after`, in the log's order. If some of these entries are gone, "
        "delete the topic in the sidecar and replay the log from its beginning.",
    ),
    # Temporary failures.
    "NOT_ATTACHED": Reason(
        UnavailableError, "UNAVAILABLE", "Attach the topic; until then tell producers to send again.", 100
    ),
    "RECOVERING": Reason(UnavailableError, "UNAVAILABLE", "Wait: the topic's log is being read.", 100),
    "DRAINING": Reason(UnavailableError, "UNAVAILABLE", "Wait for the sidecar's successor.", 200),
    "LOG_REFUSED": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Find out why the log refuses writes (is the disk full?). Retries succeed once that is cured.",
        250,
    ),
    "LOG_UNREADABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Find out why the log's files cannot be read (too many open files? a failing disk?). Retries succeed once that "
        "is cured.",
        250,
    ),
    "NOT_OWNER": Reason(UnavailableError, "UNAVAILABLE", "Ask the sidecar that owns the topic.", 100),
    "SHARDS_INCOMPLETE": Reason(
        UnavailableError, "UNAVAILABLE", "Find out why the process with these shards does not answer.", 500
    ),
    "MOVE_FAILED": Reason(
        UnavailableError,
        "FAILED_PRECONDITION",
        "Find out why the other sidecar cannot take the topic. No message is lost: at most one of the two serves it.",
        1000,
    ),
    "QUEUE_FULL": Reason(
        UnavailableError, "RESOURCE_EXHAUSTED", "Send less at once, or use a stream, which waits.", 50
    ),
    "TOO_MANY_STREAMS": Reason(
        UnavailableError, "RESOURCE_EXHAUSTED", "Share streams: one carries any number of producers.", 1000
    ),
    "SHARE_EXCEEDED": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Use less at once, or ask the sidecar's operator for a larger share (docs/reference/rules.md).",
        1000,
    ),
    "STREAM_IDLE": Reason(
        UnavailableError, "UNAVAILABLE", "Open the stream again when there is something to send or to read.", 1000
    ),
    "OUT_OF_MEMORY": Reason(
        UnavailableError, "RESOURCE_EXHAUSTED", "Give the sidecar more memory, or send less at once.", 1000
    ),
    "STORE_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Find out why the store refuses writes (is the disk full?). Retries succeed once that is cured.",
        250,
    ),
    "WINDOW_MISSING": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Import the same file again (seqdedupe import). Or let the imported IDs expire: set "
        "deduplication_window_max_minutes to less than the time since the last of them. Once the sidecar has run for "
        "40 minutes, copies of them are new.",
        1_000,
    ),
    "AUDIT_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Find out why the audit trail cannot be written (is the disk full?). Until it can, operators' calls fail.",
        1000,
    ),
    "BACKUP_FAILED": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Find out why the backup could not be written (is its disk full?), and make another.",
        1000,
    ),
    "OBJECT_STORE_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Check the bucket's name, and AWS_ENDPOINT_URL, AWS_REGION and the credentials in the environment.",
        1000,
    ),
    "UNREACHABLE": Reason(UnavailableError, "UNAVAILABLE", "Is the sidecar running, and at this address?", 100),
    "NOT_A_SIDECAR": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "If there is a proxy on the way, its log says why it answered. Otherwise: is this the address of a sidecar?",
        500,
    ),
    "TLS_FAILED": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Both ends must trust the other's certificate; docs/guides/client.md says how.",
        500,
    ),
    "CREDENTIALS_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAUTHENTICATED",
        "Find out why the token or the TLS files cannot be read. Each call and stream reads them again.",
        500,
    ),
    "UNTRUSTED_LISTENER": Reason(
        UnavailableError,
        "UNAUTHENTICATED",
        "If that is the sidecar, name the user that it runs as (SEQDEDUPE_SIDECAR_USER, sidecar_user), or better use a "
        "Unix socket. Otherwise find out who listens in its place.",
        1000,
    ),
    "OUTCOME_UNKNOWN": Reason(
        OutcomeUnknownError,
        "UNAVAILABLE",
        "Send it again with the same ID: if it is stored already, the answer is DUP.",
        0,
    ),
    # Reading.
    "POSITION_TRIMMED": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "Retention has removed messages after the position. If that is acceptable, start again from the earliest.",
    ),
    "POSITION_OF_ANOTHER_INCARNATION": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "If the position is of this topic, the topic was deleted and created again, or salvaged. Start again from the "
        "earliest if you want that. Or do several sidecars with separate data share one address?",
    ),
    "POSITION_AFTER_END": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "The topic has lost its end since the position was taken. Was an old copy of the data restored? Or do several "
        "sidecars with separate data share one address?",
    ),
    "POSITION_DIVERGED": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "An old copy of the log was restored, and other messages were appended to it. So the topic no longer contains "
        "the messages that were read before. Decide which version is correct before you read on.",
    ),
    "CURSOR_MOVED": Reason(
        FencedError,
        "ABORTED",
        "Another process uses this cursor. Stop one of them, or give each its own cursor. To go on, read it again.",
    ),
    # Missing data.
    "DATA_LOSS": Reason(
        DataLossError,
        "DATA_LOSS",
        "Acknowledged messages are missing. Was an old copy of the data restored? Or do several sidecars with separate "
        "data share one address?",
    ),
    "LOG_DAMAGED": _damaged(
        "Nothing was changed, and other topics serve. Stop the sidecar and restore logs and store from one backup. "
        "Without one, copy everything; then `seqdedupe doctor` says what is damaged and salvages the rest."
    ),
    "ANSWERS_INCONSISTENT": _damaged(
        "New streams brought no better answers. A proxy may double, drop or change them: see its log, and read without "
        "it. Or the sidecar reads its log wrongly: run `seqdedupe doctor` before anything on its disk changes."
    ),
    "LOG_GAP": _damaged(
        "Nothing was changed, and other topics serve. Has something trimmed the Pulsar topic: no retention, no durable "
        "subscription, a TTL, or a subscription that was deleted? Import a snapshot that reaches past the gap."
    ),
    "NO_STATE": _damaged(
        "Nothing was changed, and the topic is not served here. The sidecar fetches the owner's snapshot as soon as "
        "there is an owner. If there is none, import a snapshot of another sidecar (seqdedupe export, seqdedupe "
        "import)."
    ),
    "STORE_DAMAGED": _damaged(
        "Restore the store from a copy that is not older than the log. Without one, move the store folder away and "
        "start once with --rebuild-store, which makes its records again from the logs."
    ),
    "CURSOR_DAMAGED": _damaged(
        "Restore the cursor's file from a copy, or remove it: its owner then begins without a position."
    ),
    "BACKUP_DAMAGED": _damaged("Use another backup; `seqdedupe verify` says which backups are whole."),
    "NEWER_FORMAT": _damaged("Start the version that wrote it, or a newer one."),
    "OLDER_FORMAT": _damaged(
        "Start the version that wrote it. Its data is not converted: publish again what is still needed."
    ),
    "AUDIT_DAMAGED": _damaged(
        "Find out who could write to the file, and keep it. If it keeps the sidecar from starting, move it away: then "
        "the sidecar begins a new trail."
    ),
    "STORE_MISSING": _damaged(
        "The log has no record in the store. Restore both from one backup, or start once with --rebuild-store to make "
        "the record again from the log."
    ),
    # Settings by an operator or a user of the command.
    "INVALID_CONFIGURATION": _configuration(
        "Correct the key that the message names; docs/reference/configuration.md has all."
    ),
    "INVALID_ADDRESS": _configuration("Write the address as host:port, [IPv6]:port or unix:/path."),
    "INVALID_CREDENTIALS": _configuration(
        "Name files that this process can read: SEQDEDUPE_TOKEN_FILE, SEQDEDUPE_TLS_CA_FILE, or options of that name."
    ),
    "INSECURE_ADDRESS": _configuration(
        "Give the sidecar TLS, and name its authority: SEQDEDUPE_TLS_CA_FILE, tls_ca_file. If something else "
        "encrypts the connection, set SEQDEDUPE_ALLOW_INSECURE_TOKEN=true, allow_insecure_token."
    ),
    "CANNOT_LISTEN": _configuration("Correct the address that the message names, or free it."),
    "INSECURE_LISTEN": _configuration(
        "Give the sidecar a certificate (tls_certificate_file, tls_key_file), listen on loopback or a Unix socket, or "
        "allow it: allow_insecure_listen = true."
    ),
    "INVALID_FUNCTION": _configuration(
        "Correct userConfig, or how the function is deployed; docs/guides/functions.md has both."
    ),
    "FUNCTION_FAILED": _configuration("Correct the function, or set dead_letter_topic in userConfig."),
    "PULSAR_FORBIDS": _configuration(
        "Give the sidecar's credentials the permissions that docs/guides/pulsar-log.md lists, or correct the "
        "credentials."
    ),
    "PULSAR_REFUSES": _configuration(
        "Check that pulsar.admin_url is a Pulsar cluster's admin URL, and that topicLevelPoliciesEnabled is true there."
    ),
    "UNSAFE_TOPIC_POLICY": _configuration(
        "Run the commands that the message names, or let the sidecar do it: pulsar.manage_topic_policies = true."
    ),
    "DIRECTORY_IN_USE": _configuration("Stop that process, or choose another directory. Do not remove the file LOCK."),
    "SHARD_CLAIMED_TWICE": _configuration(
        "A shard has one data directory. Is one of the two a copy, or a backup? Find out which has the latest "
        "messages, and move the other one away; do not delete it."
    ),
    "DIRECTORY_NOT_EMPTY": _configuration("Name a directory that is empty or does not exist."),
    "INVALID_SOURCE": _configuration("Correct the file, or name the column, path and format that it has."),
    "SOURCE_CHANGED": _configuration(
        "`--verify` lists the differences. Publish another file under another producer name. Of a corrected file, put "
        "the new records alone into a separate file, and publish that under another producer name: the whole corrected "
        "file under another name would store the old records twice."
    ),
    "SOURCE_UNVERIFIED": _configuration(
        "If the file is the one published before, unchanged up to the record with that ID, use --trust-source."
    ),
    "SOURCE_INCOMPLETE": _configuration(
        "If the file is complete, use --final. If it still grows, use --follow, or start the command again later. If "
        "it was cut off while it was copied, get all of it first."
    ),
    "SOURCE_DIFFERS": _configuration(
        "Without --verify the command publishes what is missing after the producer's last ID (`seqdedupe producers "
        "TOPIC`). What is missing before it is a Dup under this name. Otherwise: did the file or the options change, "
        "or does something else publish under this name?"
    ),
    "SOURCE_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Correct what the message names: the server, or the address, user, password or database in the URL. End the "
        "transactions that it names. Then start the command again; nothing was lost.",
        500,
    ),
    "STANDARD_OUTPUT_FAILED": _configuration(
        "Is the disk full? What the command has done stands; only its output is missing."
    ),
    "INTERRUPTED": Reason(SeqdedupeError, "CANCELLED", "Start the command again: it goes on."),
    # Services: the outbox.
    "INVALID_OUTBOX": _configuration(
        "Run what `seqdedupe outbox ddl` prints, or correct what the message names (docs/guides/outbox.md)."
    ),
    "OUTBOX_CHANGED": _configuration(
        "Run the relay as before. To change it, let it empty the outbox, stop it, and set producer and topic in "
        "outbox_token to NULL."
    ),
    "OUTBOX_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Correct what the message names: the server, its disk, or the address, user, password or database in the URL. "
        "Nothing was lost.",
        500,
    ),
    # Spark jobs.
    "INVALID_OPTION": _configuration(
        "Correct the option that the message names; "
        "docs/guides/spark-source.md, spark-sink.md and spark-job.md list all."
    ),
    "INVALID_OUTPUT": _configuration("Change the table or the transformation, so that columns and types fit."),
    "UNSUPPORTED_MESSAGE": _configuration(
        "Read this topic with Pulsar's own client, or go on after the message: seqdedupe job reset --to MESSAGE_ID."
    ),
    "UNSUPPORTED_STORE": _configuration("Choose another store; docs/guides/spark-stores.md says what each can do."),
    "JOB_CHANGED": _configuration(
        "Run the job as it was begun, or give it another name (and table): then it reads from the start."
    ),
    "OUTPUT_MISSING": _configuration(
        "Restore the table together with the positions, or give the job another name: then it reads from the start."
    ),
    "OUTPUT_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Correct what the message names: the disk, the network, the lock, the server. Nothing was lost. A running job "
        "or consumer retries; if it has ended, start it again.",
        500,
    ),
    "POSITION_CHANGED": Reason(
        UnavailableError,
        "ABORTED",
        "Another run of this job was faster, and nothing was written: plan again from the stored position.",
        0,
    ),
    "POSITION_RESET": Reason(
        FencedError, "ABORTED", "An operator has reset the job's position. Start the job again to go on from there."
    ),
    "POSITION_WENT_BACK": Reason(
        DataLossError,
        "DATA_LOSS",
        "The job's database lacks positions that this run has committed. Perhaps a backup was restored. Start the job "
        "again: the job writes what the backup lacks.",
    ),
    # The Spark sink.
    "AMBIGUOUS_IDENTITY": _invalid(
        "Give the rows of a message different numbers in a column __ordinal, made from that message alone (as "
        "posexplode numbers them), or a deduplicationId. Otherwise all but the first would be lost as copies."
    ),
    "IDS_FORGOTTEN": Reason(
        DataLossError,
        "FAILED_PRECONDITION",
        "Nothing was written. Let the topic's deduplication_window_… outlast the longest pause of the query. To go on "
        "now, set failOnForgottenIds = false: some rows may be doubled.",
    ),
    # Services.
    "CONSUMER_CHANGED": _configuration(
        "Two consumers need two names. If only the handler of this consumer was renamed, give the old purpose: "
        "Consumer(…, purpose=…)."
    ),
    "HANDLER_FAILED": _configuration(
        "Correct the handler, and start the consumer again: it goes on with this message. "
        "docs/guides/consumer.md says how to set such messages aside."
    ),
    "TRANSACTION_ENDED": _configuration(
        "Remove COMMIT, ROLLBACK and DDL from the handler. What it did before may be committed without the position, "
        "and is repeated when the consumer is started again."
    ),
    "NOT_TRANSACTIONAL": _configuration(
        "Use an engine without AUTOCOMMIT, and tables with transactions that outlive a crash: ALTER TABLE … ENGINE = "
        "InnoDB in MariaDB, ALTER TABLE … SET LOGGED in PostgreSQL."
    ),
    "INVALID_VERSION": _invalid(
        "Give every message a key and a version from 0 up. Use each version of a key in one message only."
    ),
    "INTERNAL": Reason(SeqdedupeError, "INTERNAL", "This is a defect: report it with the sidecar's log."),
}


INSTALL_HINT = "Install it: pip install 'PATH[{}]', where PATH is a checkout or the wheel of seqdedupe."
"""To be formatted with the names of extras. The package is on no index."""


def error(
    reason: str,
    message: str,
    *,
    retry_delay_ms: int | None = None,
    hint: str | None = None,
    **numbers: object,
) -> SeqdedupeError:
    """Return the error of this reason, to be raised. Callers receive the numbers as metadata, as text."""
    known = REASONS[reason]
    return known.kind(
        reason,
        message,
        known.hint if hint is None else hint,
        known.retry_delay_ms if retry_delay_ms is None else retry_delay_ms,
        {name: str(value) for name, value in numbers.items()},
    )


def exit_status(e: SeqdedupeError) -> int:
    """Return the exit status of a process that this error ends."""
    return EXIT_WRONG if e.reason in {"INVALID_CONFIGURATION", "INSECURE_LISTEN"} else EXIT_FAILED
