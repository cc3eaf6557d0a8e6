"""Every error of this project, in one tree.

    SeqdedupeError
    ├── InvalidRequestError     the request cannot be carried out, now or later
    │   └── NotFoundError
    ├── AccessDeniedError       the caller is unknown, or may not do this
    ├── FencedError             another process owns the producer name
    ├── UnavailableError        not now: another attempt may succeed
    │   └── OutcomeUnknownError     the messages sent may be in the log or not
    ├── PositionError           reading cannot continue from a reader's position
    ├── DataLossError           acknowledged data is missing
    │   └── DamagedError            a file is damaged, incomplete or of a newer version
    └── ConfigurationError      the sidecar or a command has an invalid configuration or option

An error has a stable `reason`, a message of one line for a person, a `hint` with the next step, and the numbers of the
message. `docs/reference/errors.md` lists the reasons. A test compares that list with `REASONS`."""

from dataclasses import dataclass

NEVER = -1
"""The retry delay that means that the same request can never succeed."""

EXIT_FAILED = 1
"""The exit status of a process that an error has ended. Another attempt may succeed."""

EXIT_WRONG = 2
"""The exit status of every command and of the sidecar after wrong usage or with a wrong configuration. Another attempt
would fail too."""


class SeqdedupeError(Exception):
    """The base class of all errors of this project. Create errors with `error()`, which looks up the reason.

    The attributes are:

    - `reason`: a stable upper-case word.
    - `message`: what happened.
    - `hint`: the next step.
    - `retry_delay_ms`: the time after which another attempt may succeed, or NEVER.
    - `numbers`: the numbers of the message as text, by name."""

    def __init__(self, reason: str, message: str, hint: str, retry_delay_ms: int, numbers: dict[str, str]) -> None:
        super().__init__(message)
        # A traceback shows the note below the error. The user of a library may see only the traceback.
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
    """The request cannot be carried out, now or later. The request changed nothing."""


class NotFoundError(InvalidRequestError):
    """The topic or producer does not exist."""


class AccessDeniedError(SeqdedupeError):
    """The caller is unknown, or may not do this. The request changed nothing."""


class FencedError(SeqdedupeError):
    """Another process owns the producer name. This process must stop using the name."""


class UnavailableError(SeqdedupeError):
    """The request cannot be carried out now. Another attempt after `retry_delay_ms` may succeed."""


class OutcomeUnknownError(UnavailableError):
    """The connection was lost, or a time limit was reached. The messages sent may be in the log or not."""


class PositionError(SeqdedupeError):
    """Reading cannot continue from this position. Messages between the position and the remaining messages may be
    missing."""


class DataLossError(SeqdedupeError):
    """Acknowledged data is missing. Nothing continues automatically."""


class DamagedError(DataLossError):
    """A file is damaged, incomplete or of a newer version. Nothing was changed."""


class ConfigurationError(SeqdedupeError):
    """The sidecar or a command has an invalid configuration or option."""


@dataclass(frozen=True)
class Reason:
    """The properties of a reason: the class of the error, the gRPC status code, the hint, and the default retry
    delay."""

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
    "MALFORMED_MESSAGE": _invalid("Encode the request as the published Protobuf schema describes."),
    "INVALID_TOPIC_NAME": _invalid(
        "Write the topic's name as persistent://TENANT/NAMESPACE/NAME, or use a short name."
    ),
    "INVALID_NAMESPACE": _invalid("Write the namespace as TENANT/NAMESPACE, for example public/default."),
    "INVALID_NAME": _invalid(
        "Give every producer a name of 1 to 255 bytes of UTF-8 without control characters. Use each name only once in "
        "a request."
    ),
    "INVALID_BATCH": _invalid("Build the batch's columns as the Protobuf message Batch in batch.proto describes."),
    "INVALID_SEQUENCE_ID": _invalid("Use sequence IDs from 0 to 2^63 - 1."),
    "INVALID_DEDUPLICATION_ID": _invalid("Give every message a deduplication ID of 1 to 255 bytes."),
    "NOT_ASCENDING": _invalid(
        "Sort each producer's messages by sequence ID in every batch, and use each sequence ID of a producer only once."
    ),
    "INVALID_PREDECESSOR": _invalid(
        "Set the previous sequence ID to the highest ID that is below the batch's first ID, and that this session "
        "has sent or Open has returned."
    ),
    "LINK_REQUIRED": _invalid(
        "Set the previous sequence ID. Only a unary call without other frames in flight may omit the previous "
        "sequence ID."
    ),
    "INVALID_EPOCH": _invalid("Use the epoch that Open returned for this topic and producer name."),
    "INVALID_REQUEST": _invalid("Correct the value that the error names."),
    "UNKNOWN_CALL": Reason(
        InvalidRequestError,
        "UNIMPLEMENTED",
        "For producers and readers, use a sidecar with log = embedded or pulsar. For brokers, use a sidecar with "
        "log = broker. If the sidecar has the right log, but is older than the client, upgrade the sidecar.",
    ),
    "INVALID_POSITION": _invalid("Use a position that this sidecar returned, or an index of at least 0."),
    "MESSAGE_TOO_LARGE": _invalid("Make the message smaller. The error names the limit."),
    "BATCH_TOO_LARGE": _invalid(
        "Split the batch. If the batch is one message, make the message smaller. The error names the limit."
    ),
    "TOPIC_NOT_FOUND": Reason(
        NotFoundError,
        "NOT_FOUND",
        "Check the topic's name: `seqdedupe topics` lists the topics. To publish to a new topic, create the "
        "topic, or set allow_auto_topic_creation = true. A topic with deduplication IDs must always be created: "
        "`seqdedupe topics create --deduplication-mode deduplication-id`.",
    ),
    "TOPIC_EXISTS": Reason(InvalidRequestError, "ALREADY_EXISTS", "Use the existing topic, or choose another name."),
    "TOPIC_IS_PARTITIONED": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Name one partition of the topic, for example `name-partition-0`. In Python, producers accept the name of "
        "the whole topic, and `partitioned_reader` reads the whole topic.",
    ),
    "TOPIC_TERMINATED": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Publish to another topic; readers can still read this topic. Or delete this topic, and create a new "
        "topic with this name. The deleted topic's messages are lost.",
    ),
    "TOPIC_IN_USE": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Create a topic, and import into the new topic before a producer opens the topic or publishes a message. To "
        "take a topic of Pulsar's over, first stop its producers.",
    ),
    "LOG_INCOMPLETE": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Do not rebuild this topic from the log: retention has removed messages that the rebuild needs. If the "
        "store's records are wrong, import a saved snapshot or restore a backup.",
    ),
    "PRODUCER_NOT_FOUND": Reason(
        NotFoundError, "NOT_FOUND", "Check the producer's name: `seqdedupe producers TOPIC` lists the producers."
    ),
    "CURSOR_NOT_FOUND": Reason(
        NotFoundError, "NOT_FOUND", "Check the cursor's name: `seqdedupe cursors TOPIC` lists the cursors."
    ),
    "TOO_MANY_CURSORS": Reason(
        InvalidRequestError,
        "RESOURCE_EXHAUSTED",
        "Remove cursors that are no longer needed (`seqdedupe cursors TOPIC --remove NAME`), or keep positions in "
        "files.",
    ),
    "SIDECAR_NOT_FOUND": Reason(
        NotFoundError,
        "NOT_FOUND",
        "Check the sidecar's name: `seqdedupe sidecars` lists the names. A sidecar that was already forgotten is "
        "not in the list.",
    ),
    "SIDECAR_ALIVE": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Stop the sidecar before you forget the sidecar. Do not forget a sidecar that you still need: the "
        "sidecar's subscriptions keep the messages that the sidecar's snapshots do not cover.",
    ),
    "TOO_MANY_TOPICS": Reason(
        InvalidRequestError, "RESOURCE_EXHAUSTED", "Delete topics that are no longer needed, or raise max_topics."
    ),
    # Access.
    "UNAUTHENTICATED": Reason(
        AccessDeniedError,
        "UNAUTHENTICATED",
        "Send the sidecar's token: set SEQDEDUPE_TOKEN to the token, or SEQDEDUPE_TOKEN_FILE to the path of the file "
        "`token` in the sidecar's data directory. See docs/guides/security.md.",
    ),
    "NOT_ALLOWED": Reason(
        AccessDeniedError,
        "PERMISSION_DENIED",
        "Ask the sidecar's operator for a rule that allows this action. `seqdedupe auth explain` shows the rule "
        "that decides about the action.",
    ),
    "TOKEN_EXPIRED": Reason(UnavailableError, "UNAUTHENTICATED", "Send a token that is still valid.", 0),
    # Sessions and order.
    "FENCED": Reason(
        FencedError,
        "FAILED_PRECONDITION",
        "Stop this process, or give this process's producer another name. Another process has opened this "
        "producer name later, or an operator has reset the producer.",
    ),
    "PRODUCER_BUSY": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Give each producer of a topic a different name, or wait until the topic's other producer is closed.",
        1000,
    ),
    "CONSUMER_BUSY": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Give each consumer its own subscription, or use the type Failover for all consumers of this one.",
        1000,
    ),
    "PREDECESSOR_MISSING": Reason(
        UnavailableError,
        "FAILED_PRECONDITION",
        "Send all messages again, beginning with the first message without a receipt.",
        0,
    ),
    "GAP": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Send the missing messages, in order. If no message is missing, allow gaps (`seqdedupe policy set TOPIC --gap "
        "allow`), and open the producer again.",
    ),
    "OVERLAP": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Split the range of sequence IDs after the producer's highest persisted ID, or change the topic's policy so "
        "that the sidecar answers as Pulsar does.",
    ),
    "REPLAY_GAP": Reason(
        DataLossError,
        "FAILED_PRECONDITION",
        "Replay every entry after `Attached.replay_after`, in the log's order. If some of these entries no longer "
        "exist, delete the topic in the sidecar, and replay the log from the log's beginning.",
    ),
    # Temporary failures.
    "NOT_ATTACHED": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Attach the topic. Until the topic is attached, tell producers to send their messages again.",
        100,
    ),
    "RECOVERING": Reason(UnavailableError, "UNAVAILABLE", "Wait until the sidecar has read the topic's log.", 100),
    "DRAINING": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Wait until this sidecar has restarted, or until another sidecar serves the topic. This sidecar is "
        "shutting down.",
        200,
    ),
    "LOG_REFUSED": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Remove the cause, usually a full disk; then retries succeed.",
        250,
    ),
    "LOG_UNREADABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Remove the cause, usually too many open files or a failing disk; then retries succeed.",
        250,
    ),
    "NOT_OWNER": Reason(UnavailableError, "UNAVAILABLE", "Send the request to the sidecar that owns the topic.", 100),
    "SHARDS_INCOMPLETE": Reason(
        UnavailableError, "UNAVAILABLE", "Find out why the process with these shards does not answer.", 500
    ),
    "MOVE_FAILED": Reason(
        UnavailableError,
        "FAILED_PRECONDITION",
        "Find out why the other sidecar cannot receive the topic. No message is lost: at most one of the two sidecars "
        "serves the topic.",
        1000,
    ),
    "QUEUE_FULL": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Send fewer bytes at once, or use a stream. A stream waits until the queue has room.",
        50,
    ),
    "TOO_MANY_STREAMS": Reason(
        UnavailableError, "RESOURCE_EXHAUSTED", "Use fewer streams. One stream can serve any number of producers.", 1000
    ),
    "SHARE_EXCEEDED": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Use less of the share that the error names, or ask the sidecar's operator for a larger share "
        "(docs/reference/rules.md).",
        1000,
    ),
    "STREAM_IDLE": Reason(
        UnavailableError, "UNAVAILABLE", "Open a new stream when there is something to send or to read.", 1000
    ),
    "OUT_OF_MEMORY": Reason(
        UnavailableError, "RESOURCE_EXHAUSTED", "Give the sidecar more memory, or send less data at once.", 1000
    ),
    "STORE_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Remove the cause, usually a full disk; then retries succeed.",
        250,
    ),
    "WINDOW_MISSING": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Import the same file again (seqdedupe import). Or let the imported IDs expire: set "
        "deduplication_window_max_minutes to less than the age of the newest imported ID, and let the sidecar run "
        "for 40 minutes. Then the sidecar accepts messages with the imported IDs as new.",
        1_000,
    ),
    "AUDIT_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Find out why the sidecar cannot write the audit trail; the usual cause is a full disk. Operators' calls "
        "fail until the sidecar can write the audit trail.",
        1000,
    ),
    "BACKUP_FAILED": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Remove the cause, usually a full disk in the backup's place, and make another backup.",
        1000,
    ),
    "OBJECT_STORE_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Check the bucket's name, and AWS_ENDPOINT_URL, AWS_REGION and the credentials in the environment.",
        1000,
    ),
    "UNREACHABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Check that the sidecar is running, and that the sidecar listens at this address.",
        100,
    ),
    "NOT_A_SIDECAR": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Check that the address is the sidecar's address. If a proxy is in between, the proxy's log shows why the "
        "proxy answered instead of the sidecar.",
        500,
    ),
    "TLS_FAILED": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Make each side trust the certificate of the other side; docs/guides/client.md describes how.",
        500,
    ),
    "CREDENTIALS_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAUTHENTICATED",
        "Find out why this process cannot read the token or the TLS files. Each new call or stream reads the "
        "token and the TLS files again.",
        500,
    ),
    "UNTRUSTED_LISTENER": Reason(
        UnavailableError,
        "UNAUTHENTICATED",
        "Find out which process listens at this address. If that process is the sidecar, name the user that the "
        "sidecar runs as (SEQDEDUPE_SIDECAR_USER, sidecar_user), or better use a Unix socket.",
        1000,
    ),
    "OUTCOME_UNKNOWN": Reason(
        OutcomeUnknownError,
        "UNAVAILABLE",
        "Send the message again with the same ID. If the message was already stored, the answer is DUP.",
        0,
    ),
    # Reading.
    "POSITION_TRIMMED": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "Start again from the earliest message, if you can accept the loss: retention has removed messages after "
        "the position.",
    ),
    "POSITION_OF_ANOTHER_INCARNATION": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "Check that the position belongs to this topic. Also check whether several sidecars with separate data "
        "share one address. If neither is the cause, the topic was deleted and created again, or salvaged. If "
        "that is acceptable, start again from the earliest message.",
    ),
    "POSITION_AFTER_END": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "Check whether an old copy of the data was restored, or whether several sidecars with separate data share "
        "one address. The topic has lost its last messages since the position was stored.",
    ),
    "POSITION_DIVERGED": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "Decide which version of the log is correct before you read on. An old copy of the log was restored, and "
        "other messages were appended to the copy. So the topic no longer contains the messages that were read "
        "before.",
    ),
    "CURSOR_MOVED": Reason(
        FencedError,
        "ABORTED",
        "Stop all but one of the processes that use this cursor, or give each process a separate cursor. To "
        "continue, read the cursor again.",
    ),
    # Missing data.
    "DATA_LOSS": Reason(
        DataLossError,
        "DATA_LOSS",
        "Check whether an old copy of the data was restored, or whether several sidecars with separate data share "
        "one address. Acknowledged messages are missing.",
    ),
    "LOG_DAMAGED": _damaged(
        "Stop the sidecar, and restore logs and store from the same backup. Without a backup, copy the data "
        "directory; then `seqdedupe doctor` shows the damage and salvages the undamaged messages. Nothing was "
        "changed, and other topics still serve."
    ),
    "ANSWERS_INCONSISTENT": _damaged(
        "Check the log of the proxy, and read without the proxy: a proxy may repeat, drop or change answers. If "
        "there is no proxy, the sidecar may read its log wrongly: run `seqdedupe doctor` before anything on the "
        "sidecar's disk changes."
    ),
    "LOG_GAP": _damaged(
        "Check whether Pulsar has removed messages of the topic. Causes are missing retention, a missing or "
        "deleted durable subscription, and a TTL. Then import a snapshot that covers the gap. Nothing was "
        "changed, and other topics still serve."
    ),
    "NO_STATE": _damaged(
        "Wait until the topic has an owner; then this sidecar fetches the owner's snapshot. If no sidecar can own "
        "the topic, import a snapshot of another sidecar (seqdedupe export, seqdedupe import). Nothing was "
        "changed, and this sidecar does not serve the topic."
    ),
    "STORE_DAMAGED": _damaged(
        "Restore the store from a copy that is not older than the log. Without such a copy, move the store folder "
        "away, and start the sidecar once with --rebuild-store, which recreates the store's records from the "
        "logs."
    ),
    "CURSOR_DAMAGED": _damaged(
        "Restore the cursor's file from a copy, or remove the file. Without the file, the cursor's owner begins "
        "without a position."
    ),
    "BACKUP_DAMAGED": _damaged("Use another backup; `seqdedupe verify` shows whether a backup is undamaged."),
    "NEWER_FORMAT": _damaged("Start the version of seqdedupe that wrote the data, or a newer version."),
    "OLDER_FORMAT": _damaged(
        "Start the version of seqdedupe that wrote the data. Newer versions do not convert the data. To use a "
        "newer version, publish the messages that are still needed again."
    ),
    "AUDIT_DAMAGED": _damaged(
        "Find out who could write to the audit trail's file, and keep the file. If the file prevents the sidecar "
        "from starting, move the file away. The sidecar then begins a new audit trail."
    ),
    "STORE_MISSING": _damaged(
        "Restore log and store from the same backup. Or start the sidecar once with --rebuild-store, which "
        "recreates the store's record of the topic from the log."
    ),
    # Settings by an operator or a user of the command.
    "INVALID_CONFIGURATION": _configuration(
        "Correct the key that the error names; docs/reference/configuration.md lists all keys."
    ),
    "INVALID_ADDRESS": _configuration("Write the address as host:port, [IPv6]:port or unix:/path."),
    "INVALID_CREDENTIALS": _configuration(
        "Name files that this process can read: SEQDEDUPE_TOKEN_FILE, SEQDEDUPE_TLS_CA_FILE, or the options with "
        "these names."
    ),
    "INSECURE_ADDRESS": _configuration(
        "Give the sidecar a TLS certificate, and name the authority that signed the certificate "
        "(SEQDEDUPE_TLS_CA_FILE, tls_ca_file). If the connection is encrypted in another way, set "
        "SEQDEDUPE_ALLOW_INSECURE_TOKEN=true or allow_insecure_token."
    ),
    "CANNOT_LISTEN": _configuration(
        "Correct the address that the error names, or stop the process that uses the address."
    ),
    "INSECURE_LISTEN": _configuration(
        "Give the sidecar a certificate (tls_certificate_file, tls_key_file), listen on loopback or a Unix socket, or "
        "allow connections without TLS: allow_insecure_listen = true."
    ),
    "INVALID_FUNCTION": _configuration(
        "Correct userConfig or the function's deployment; docs/guides/functions.md describes userConfig and the "
        "deployment."
    ),
    "FUNCTION_FAILED": _configuration("Correct the function, or set dead_letter_topic in userConfig."),
    "PULSAR_FORBIDS": _configuration(
        "Give the sidecar's credentials the permissions that docs/guides/pulsar-log.md lists, or correct the "
        "credentials."
    ),
    "PULSAR_REFUSES": _configuration(
        "Check that pulsar.admin_url is a Pulsar cluster's admin URL, and that topicLevelPoliciesEnabled is true "
        "in that cluster."
    ),
    "UNSAFE_TOPIC_POLICY": _configuration(
        "Run the commands that the error names, or let the sidecar set the policies: pulsar.manage_topic_policies "
        "= true."
    ),
    "DIRECTORY_IN_USE": _configuration(
        "Stop the process that uses the directory, or choose another directory. Do not remove the file LOCK."
    ),
    "SHARD_CLAIMED_TWICE": _configuration(
        "Find out which of the two data directories has the latest messages, and move the other directory away. "
        "Do not delete the other directory. A shard may have only one data directory; the other directory may be "
        "a copy or a backup."
    ),
    "DIRECTORY_NOT_EMPTY": _configuration("Name a directory that is empty or does not exist."),
    "INVALID_SOURCE": _configuration(
        "Correct the file or the rows of the query. Or correct the options: the format, and the column or JSON "
        "path of each value."
    ),
    "SOURCE_CHANGED": _configuration(
        "Publish a different file under another producer name. If the file was corrected, put only the new "
        "records into a separate file, and publish that file under another producer name. The whole corrected "
        "file under another name would store the old records twice. `--verify` lists the differences."
    ),
    "SOURCE_UNVERIFIED": _configuration(
        "Use --trust-source, if this file is the file that was published before, and the file is unchanged up to "
        "the record with that ID."
    ),
    "SOURCE_INCOMPLETE": _configuration(
        "If the file is complete, use --final. If the file still grows, use --follow, or start the command again "
        "later. If somebody copied only a part of the file, copy the whole file first."
    ),
    "SOURCE_DIFFERS": _configuration(
        "Check whether the file or the options have changed, or whether something else publishes under this "
        "producer name. Without --verify, the command publishes the records that are missing after the producer's "
        "last ID (`seqdedupe producers TOPIC`). A record that is missing before the last ID would be a Dup under "
        "this producer name."
    ),
    "SOURCE_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Correct the cause that the error names: the server, or the address, user, password or database in the "
        "URL. If the error names transactions, end the transactions. Then start the command again; nothing was "
        "lost.",
        500,
    ),
    "STANDARD_OUTPUT_FAILED": _configuration(
        "Check whether the disk is full. The command's changes stay in effect; only the command's output is missing."
    ),
    "INTERRUPTED": Reason(
        SeqdedupeError, "CANCELLED", "Start the command again: the command continues where the command was interrupted."
    ),
    # Services: the outbox.
    "INVALID_OUTBOX": _configuration(
        "Run the statements that `seqdedupe outbox ddl` prints, or correct the problem that the error names "
        "(docs/guides/outbox.md)."
    ),
    "OUTBOX_CHANGED": _configuration(
        "Run the relay with the producer name and topic used before. To change the producer name or topic, let "
        "the relay empty the outbox, stop the relay, and set producer and topic in outbox_token to NULL."
    ),
    "OUTBOX_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Correct the cause that the error names: the server, the server's disk, or the address, user, password or "
        "database in the URL. Nothing was lost.",
        500,
    ),
    # Spark jobs.
    "INVALID_OPTION": _configuration(
        "Correct the option that the error names; docs/guides/spark-source.md, spark-sink.md and spark-job.md "
        "list all options."
    ),
    "INVALID_OUTPUT": _configuration(
        "Change the table or the transformation, so that the rows' columns and types fit the table."
    ),
    "UNSUPPORTED_MESSAGE": _configuration(
        "Read this topic with Pulsar's own client, or continue after the unsupported message: seqdedupe job reset "
        "--to MESSAGE_ID."
    ),
    "UNSUPPORTED_STORE": _configuration(
        "Choose another store; docs/guides/spark-stores.md describes what each store can do."
    ),
    "JOB_CHANGED": _configuration(
        "Run the job with its original table and options. Or use a new job name and another table; the new job "
        "reads from the start."
    ),
    "OUTPUT_MISSING": _configuration(
        "Restore the table together with the positions. Or use a new job name; the new job reads from the start."
    ),
    "OUTPUT_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Correct the cause that the error names: the disk, the network, the lock, the server. Nothing was lost. A "
        "running job or consumer retries; start a job or consumer that has ended again.",
        500,
    ),
    "POSITION_CHANGED": Reason(
        UnavailableError,
        "ABORTED",
        "Continue from the stored position. Another run of this job has moved the position first, and this run "
        "wrote nothing.",
        0,
    ),
    "POSITION_RESET": Reason(
        FencedError,
        "ABORTED",
        "Start the job again to continue from the new position. An operator has reset the job's position.",
    ),
    "POSITION_WENT_BACK": Reason(
        DataLossError,
        "DATA_LOSS",
        "Start the job again: the job writes the rows that the database lacks. The job's database lacks positions "
        "that this run has committed; perhaps a backup was restored.",
    ),
    # The Spark sink.
    "AMBIGUOUS_IDENTITY": _invalid(
        "Number the rows of each message in a column __ordinal, computed from that message alone (as posexplode "
        "does), or give each row a deduplicationId. Otherwise all rows of a message except the first row would be "
        "dropped as duplicates."
    ),
    "IDS_FORGOTTEN": Reason(
        DataLossError,
        "FAILED_PRECONDITION",
        "Raise the topic's deduplication_window_… so that the window lasts longer than the longest pause of the "
        "query. Nothing was written. To continue now, set failOnForgottenIds = false; then some rows may be "
        "stored twice.",
    ),
    # Services.
    "CONSUMER_CHANGED": _configuration(
        "Give the two consumers different names. If only the handler of this consumer was renamed, pass the "
        "consumer's old purpose: Consumer(…, purpose=…)."
    ),
    "HANDLER_FAILED": _configuration(
        "Correct the handler, and start the consumer again: the consumer continues with this message. "
        "docs/guides/consumer.md describes how to set failing messages aside."
    ),
    "TRANSACTION_ENDED": _configuration(
        "Remove COMMIT, ROLLBACK and DDL from the handler. The handler's earlier changes may be committed without "
        "the position. The restarted consumer then repeats these changes."
    ),
    "NOT_TRANSACTIONAL": _configuration(
        "Use an engine without AUTOCOMMIT, and tables that have transactions and survive a crash: ALTER TABLE … "
        "ENGINE = InnoDB in MariaDB, ALTER TABLE … SET LOGGED in PostgreSQL."
    ),
    "INVALID_VERSION": _invalid(
        "Give every message a key and a version of at least 0. Use each version of a key in only one message."
    ),
    "INTERNAL": Reason(SeqdedupeError, "INTERNAL", "Report this defect, with the sidecar's log."),
}


INSTALL_HINT = "Install the missing extra: pip install 'PATH[{}]', where PATH is a checkout or the wheel of seqdedupe."
"""A hint that is formatted with the names of extras. It has a path because no package index has the package."""


def error(
    reason: str,
    message: str,
    *,
    retry_delay_ms: int | None = None,
    hint: str | None = None,
    **numbers: object,
) -> SeqdedupeError:
    """Return an error with this reason, for the caller to raise. gRPC clients receive the numbers as metadata."""
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
