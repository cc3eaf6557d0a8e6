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

from typing import NamedTuple

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


class Reason(NamedTuple):
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
        "Set the previous sequence ID to the highest ID below the batch's first ID. Choose only among IDs that "
        "this session has sent, or that Open has returned."
    ),
    "LINK_REQUIRED": _invalid(
        "Only a unary call may omit the previous sequence ID, and only while no other frame of the producer is in "
        "flight. Set the previous sequence ID."
    ),
    "INVALID_EPOCH": _invalid("Use the epoch that Open returned for this topic and producer name."),
    "INVALID_REQUEST": _invalid("Correct the value that the error names."),
    "UNKNOWN_CALL": Reason(
        InvalidRequestError,
        "UNIMPLEMENTED",
        "Producers and readers need a sidecar with log = embedded or log = pulsar. Brokers need a sidecar with log "
        "= broker. If the sidecar has the right log, but is older than the client, upgrade the sidecar.",
    ),
    "INVALID_POSITION": _invalid("Use a position that this sidecar returned, or an index of at least 0."),
    "MESSAGE_TOO_LARGE": _invalid("The error names the limit. Make the message smaller."),
    "BATCH_TOO_LARGE": _invalid(
        "The error names the limit. Split the batch into smaller batches. If the batch contains only one message, "
        "make this message smaller."
    ),
    "TOPIC_NOT_FOUND": Reason(
        NotFoundError,
        "NOT_FOUND",
        "Check the topic's name: `seqdedupe topics` lists the topics. To publish to a new topic, create the topic, "
        "or set allow_auto_topic_creation = true. A topic of deduplication IDs must be created: `seqdedupe topics "
        "create --deduplication-mode deduplication-id`.",
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
        "The topic accepts no more messages, but readers can still read the topic. Publish to another topic. Or "
        "delete this topic, and create a new topic with the same name. The deleted topic's messages are lost.",
    ),
    "TOPIC_IN_USE": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "The target of an import must be a new topic. Create a topic, and import before a producer opens the topic or "
        "publishes to the topic. Before you take over a topic of Pulsar, stop the topic's producers.",
    ),
    "LOG_INCOMPLETE": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Retention has removed messages that the rebuild needs. Do not rebuild this topic from the log. If the "
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
        "Remove cursors that are no longer needed: `seqdedupe cursors TOPIC --remove NAME`.",
    ),
    "SIDECAR_NOT_FOUND": Reason(
        NotFoundError,
        "NOT_FOUND",
        "Check the sidecar's name: `seqdedupe sidecars` lists all sidecars that were not removed.",
    ),
    "SIDECAR_ALIVE": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "The sidecar's subscriptions retain the messages that the sidecar's snapshots do not cover. If you still "
        "need the sidecar, do not forget the sidecar. Otherwise, stop the sidecar before you forget it.",
    ),
    "TOO_MANY_TOPICS": Reason(
        InvalidRequestError, "RESOURCE_EXHAUSTED", "Delete topics that are no longer needed, or raise max_topics."
    ),
    # Access.
    "UNAUTHENTICATED": Reason(
        AccessDeniedError,
        "UNAUTHENTICATED",
        "Send the sidecar's token. Set SEQDEDUPE_TOKEN to the token itself. Or set SEQDEDUPE_TOKEN_FILE to the "
        "path of the file `token` in the sidecar's data directory. See docs/guides/security.md.",
    ),
    "NOT_ALLOWED": Reason(
        AccessDeniedError,
        "PERMISSION_DENIED",
        "Ask the sidecar's operator for a rule that allows this action (`seqdedupe auth explain`).",
    ),
    "TOKEN_EXPIRED": Reason(UnavailableError, "UNAUTHENTICATED", "Send a token that is still valid.", 0),
    # Sessions and order.
    "FENCED": Reason(
        FencedError,
        "FAILED_PRECONDITION",
        "Another process opened this producer name after this process had opened it, or an operator has reset the "
        "producer. Stop this process, or give this process's producer a different name.",
    ),
    "PRODUCER_BUSY": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Two open producers of a topic cannot have the same name. Give each producer of the topic a different "
        "name, or wait until the other producer with this name is closed.",
        1000,
    ),
    "CONSUMER_BUSY": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Give each consumer a separate subscription, or use the type Failover for all consumers of this subscription.",
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
        "Send the missing messages first, in order. If no message is missing, allow gaps (`seqdedupe policy set "
        "TOPIC --gap allow`). After that, open the producer again.",
    ),
    "OVERLAP": Reason(
        InvalidRequestError,
        "FAILED_PRECONDITION",
        "Split the range of sequence IDs after the highest persisted ID of the producer. Or set the "
        "topic's policy `overlap` to PULSAR, so that the sidecar answers as Pulsar does.",
    ),
    "REPLAY_GAP": Reason(
        DataLossError,
        "FAILED_PRECONDITION",
        "Replay every entry after `Attached.replay_after`, in the log's order. If some of these entries no longer "
        "exist, delete the topic in the sidecar. After that, replay the log from the log's beginning.",
    ),
    # Temporary failures.
    "NOT_ATTACHED": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Attach the topic. Until it is attached, refuse the producers' messages with an error that makes them retry.",
        100,
    ),
    "RECOVERING": Reason(UnavailableError, "UNAVAILABLE", "Wait until the sidecar has read the topic's log.", 100),
    "DRAINING": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "The sidecar is shutting down. Wait until it has restarted, or until another sidecar serves the topic.",
        200,
    ),
    "LOG_REFUSED": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "The usual cause is a full disk. Remove the cause. Retries succeed after that.",
        250,
    ),
    "LOG_UNREADABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "The usual causes are too many open files and a failing disk. Remove the cause. Retries succeed after that.",
        250,
    ),
    "NOT_OWNER": Reason(UnavailableError, "UNAVAILABLE", "Send the request to the sidecar that owns the topic.", 100),
    "SHARDS_INCOMPLETE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "The process with these shards does not answer, or is not in `peers`. Repair the process or correct `peers`.",
        500,
    ),
    "MOVE_FAILED": Reason(
        UnavailableError,
        "FAILED_PRECONDITION",
        "No message is lost: at most one of the two sidecars serves the topic. Find out why the target sidecar "
        "cannot receive the topic.",
        1000,
    ),
    "QUEUE_FULL": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "Send fewer bytes at once, or use a stream. A stream waits until the queue has room.",
        50,
    ),
    "TOO_MANY_STREAMS": Reason(
        UnavailableError, "RESOURCE_EXHAUSTED", "One stream can serve any number of producers. Use fewer streams.", 1000
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
        "The usual cause is a full disk. Remove the cause. Retries succeed after that.",
        250,
    ),
    "WINDOW_MISSING": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Import the same file again (seqdedupe import). Or let the imported IDs expire: set "
        "deduplication_window_max_minutes to less than the age of the newest imported ID, and let the sidecar run "
        "for 40 minutes. After this, messages with the imported IDs count as new.",
        1_000,
    ),
    "AUDIT_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Operators' calls fail until the audit trail can be written. The usual cause is a full disk.",
        1000,
    ),
    "BACKUP_FAILED": Reason(
        UnavailableError,
        "RESOURCE_EXHAUSTED",
        "The usual cause is a full disk where the backup is stored. Remove the cause. Then make the backup again.",
        1000,
    ),
    "OBJECT_STORE_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Check the bucket's name. Also check these environment variables: AWS_ENDPOINT_URL, AWS_REGION, and the "
        "variables with the credentials.",
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
        "Check that the address is the sidecar's address. If the connection goes through a proxy, read the proxy's "
        "log. The log shows why the proxy answered instead of the sidecar.",
        500,
    ),
    "TLS_FAILED": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Make each side trust the certificate of the other side. docs/guides/client.md describes how.",
        500,
    ),
    "CREDENTIALS_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAUTHENTICATED",
        "This process cannot read its token or its TLS files. Find out why. Each new call or stream reads the "
        "token and the TLS files again.",
        500,
    ),
    "UNTRUSTED_LISTENER": Reason(
        UnavailableError,
        "UNAUTHENTICATED",
        "Find out which process listens at this address. If that process is the sidecar, set SEQDEDUPE_SIDECAR_USER "
        "or sidecar_user to the name of the sidecar's user. A Unix socket is safer.",
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
        "Retention has removed messages after the position. To accept the loss, start from the earliest message.",
    ),
    "POSITION_OF_ANOTHER_INCARNATION": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "Check that the position belongs to this topic. Also check whether several sidecars with separate data "
        "share one address. If neither is the cause, the topic was deleted and created again, or was salvaged. If "
        "you can accept this change of the topic, start again from the earliest message.",
    ),
    "POSITION_AFTER_END": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "The topic has lost its last messages since the position was stored. Check whether an old copy of the data "
        "was restored, or whether several sidecars with separate data share one address.",
    ),
    "POSITION_DIVERGED": Reason(
        PositionError,
        "OUT_OF_RANGE",
        "An old copy of the log was restored, and different messages were appended to the copy. So the topic no "
        "longer contains all messages that were read before. Decide which version of the log is correct before you "
        "continue to read.",
    ),
    "CURSOR_MOVED": Reason(
        FencedError,
        "ABORTED",
        "Another process moved the cursor. Let only one process use this cursor: stop the other processes, or "
        "give each process a separate cursor. To continue in this process, read the cursor again.",
    ),
    # Missing data.
    "DATA_LOSS": Reason(
        DataLossError,
        "DATA_LOSS",
        "Acknowledged messages are missing. Check whether an old copy of the data was restored, or whether several "
        "sidecars with separate data share one address.",
    ),
    "LOG_DAMAGED": _damaged(
        "Nothing was changed, and other topics still work. Stop the sidecar, and restore both `logs` and `store` "
        "from the same backup. If you have no backup, first copy the data directory. After that, `seqdedupe "
        "doctor` shows the damage and can salvage the undamaged messages."
    ),
    "ANSWERS_INCONSISTENT": _damaged(
        "A proxy may repeat, drop or change answers. Check the proxy's log, and read without the proxy. If there "
        "is no proxy, the sidecar may be reading its log incorrectly. In that case, run `seqdedupe doctor` before "
        "anything on the sidecar's disk changes."
    ),
    "LOG_GAP": _damaged(
        "Nothing was changed, and other topics still work. Check whether Pulsar has removed messages of the topic. "
        "Possible causes are missing retention, a missing or deleted durable subscription, and a TTL. After this "
        "check, import a snapshot that covers the gap."
    ),
    "NO_STATE": _damaged(
        "Nothing was changed, and this sidecar does not serve the topic. Wait until the topic has an owner. This "
        "sidecar then fetches the owner's snapshot. If no sidecar can own the topic, import a snapshot from "
        "another sidecar (seqdedupe export, seqdedupe import)."
    ),
    "STORE_DAMAGED": _damaged(
        "Restore the folder `store` from a copy that is not older than the log. If you have no such copy, move the "
        "folder `store` away, and start the sidecar once with --rebuild-store. This option recreates the store's "
        "records from the logs."
    ),
    "CURSOR_DAMAGED": _damaged(
        "Restore the cursor's file from a copy, or remove the file. If you remove the file, the cursor's owner "
        "begins without a position."
    ),
    "BACKUP_DAMAGED": _damaged("Use a different backup. `seqdedupe verify` shows whether a backup is undamaged."),
    "NEWER_FORMAT": _damaged("A newer version of seqdedupe wrote the data. Start that version, or a later version."),
    "OLDER_FORMAT": _damaged(
        "An older version of seqdedupe wrote the data. Start that version. Newer versions do not convert the data. "
        "To use a newer version, publish the messages that you still need again, with the newer version."
    ),
    "AUDIT_DAMAGED": _damaged(
        "Find out who could write to the audit trail's file. Do not delete the file. If the file prevents the "
        "sidecar from starting, move the file to another folder. The sidecar then begins a new audit trail."
    ),
    "STORE_MISSING": _damaged(
        "Restore both `logs` and `store` from the same backup. Or start the sidecar once with --rebuild-store. "
        "This option recreates the store's record of the topic from the log."
    ),
    # Settings by an operator or a user of the command.
    "INVALID_CONFIGURATION": _configuration(
        "Correct the key that the error names. docs/reference/configuration.md lists all keys."
    ),
    "INVALID_ADDRESS": _configuration("Write the address as host:port, [IPv6]:port or unix:/path."),
    "INVALID_CREDENTIALS": _configuration(
        "Set SEQDEDUPE_TOKEN_FILE and SEQDEDUPE_TLS_CA_FILE, or the options with the same meaning, to files that this "
        "process can read."
    ),
    "INSECURE_ADDRESS": _configuration(
        "Give the sidecar a TLS certificate. Name the authority that signed the certificate with "
        "SEQDEDUPE_TLS_CA_FILE or tls_ca_file. If another layer encrypts the connection, set "
        "SEQDEDUPE_ALLOW_INSECURE_TOKEN=true or allow_insecure_token."
    ),
    "CANNOT_LISTEN": _configuration(
        "Correct the address that the error names, or stop the process that uses the address."
    ),
    "INSECURE_LISTEN": _configuration(
        "Give the sidecar a certificate (tls_certificate_file, tls_key_file). Or listen only on loopback or on a "
        "Unix socket. Or allow connections without TLS: set allow_insecure_listen = true."
    ),
    "INVALID_FUNCTION": _configuration(
        "Correct userConfig or the function's deployment. docs/guides/functions.md describes userConfig and the "
        "deployment."
    ),
    "FUNCTION_FAILED": _configuration("Correct the function, or set dead_letter_topic in userConfig."),
    "PULSAR_FORBIDS": _configuration(
        "Correct the sidecar's credentials, or give these credentials the permissions that "
        "docs/guides/pulsar-log.md lists."
    ),
    "PULSAR_REFUSES": _configuration(
        "Check that pulsar.admin_url is a Pulsar cluster's admin URL, and that topicLevelPoliciesEnabled is true "
        "in that cluster."
    ),
    "UNSAFE_TOPIC_POLICY": _configuration(
        "Run the commands that the error names. Or set pulsar.manage_topic_policies = true: with this setting, "
        "the sidecar sets the policies itself."
    ),
    "DIRECTORY_IN_USE": _configuration(
        "Stop the process that uses the directory, or choose another directory. Do not remove the file LOCK."
    ),
    "SHARD_CLAIMED_TWICE": _configuration(
        "A shard may have only one data directory. One of the two directories may be a copy or a backup. Find out "
        "which directory has the latest messages. Move the other directory away, but do not delete it."
    ),
    "DIRECTORY_NOT_EMPTY": _configuration("Name a directory that is empty or does not exist."),
    "INVALID_SOURCE": _configuration(
        "Correct the file, or the rows that the query returns. Or correct the options for the format, and for the "
        "column or JSON path of each value."
    ),
    "SOURCE_CHANGED": _configuration(
        "Publish a different file under a different producer name. If you corrected the file, put only the new "
        "records into a separate file, and publish this separate file under a different producer name. Do not "
        "publish the whole corrected file under a different name: the topic would store the old records twice. "
        "`--verify` lists the differences."
    ),
    "SOURCE_UNVERIFIED": _configuration(
        "If this is the file that was published before, and the file is unchanged up to the last published ID, use "
        "--trust-source."
    ),
    "SOURCE_INCOMPLETE": _configuration(
        "If the file is complete, use --final. If the file still grows, use --follow, or start the command again "
        "later. If this file is only a part of another file, copy the whole file first."
    ),
    "SOURCE_DIFFERS": _configuration(
        "Check whether the file or the options have changed. Also check whether another program publishes under "
        "this producer name. Without --verify, the command publishes only records after the producer's last ID "
        "(`seqdedupe producers TOPIC` shows this ID). If you publish a missing record before this ID under the "
        "same producer name, the verdict is Dup, and the topic does not store the record."
    ),
    "SOURCE_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Nothing was lost. Correct the cause that the error names: the server, or the address, user, password or "
        "database in the URL. If the error names transactions, end them. Then start the command again.",
        500,
    ),
    "STANDARD_OUTPUT_FAILED": _configuration(
        "The command's changes stay in effect. Only the command's output is missing. Check whether the disk is full."
    ),
    "INTERRUPTED": Reason(
        SeqdedupeError, "CANCELLED", "Start the command again. The command continues where it was interrupted."
    ),
    # Services: the outbox.
    "INVALID_OUTBOX": _configuration(
        "Run the statements that `seqdedupe outbox ddl` prints, or correct the problem that the error names "
        "(docs/guides/outbox.md)."
    ),
    "OUTBOX_CHANGED": _configuration(
        "Run the relay with the producer name and topic that the relay used before. To change the producer name or "
        "topic, first let the relay empty the outbox. After that, stop the relay, and set the columns producer and "
        "topic of outbox_token to NULL."
    ),
    "OUTBOX_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Nothing was lost. Correct the cause that the error names: the server, the server's disk, or the address, "
        "user, password or database in the URL.",
        500,
    ),
    # Spark jobs.
    "INVALID_OPTION": _configuration(
        "Correct the option that the error names. docs/guides/spark-source.md, spark-sink.md and spark-job.md list "
        "all options."
    ),
    "INVALID_OUTPUT": _configuration(
        "Change the table or the transformation, so that the rows' columns and types fit the table."
    ),
    "UNSUPPORTED_MESSAGE": _configuration(
        "Read this topic with Pulsar's own client. Or continue after the unsupported message: run `seqdedupe job "
        "reset --to MESSAGE_ID`."
    ),
    "UNSUPPORTED_STORE": _configuration(
        "Choose a different store. docs/guides/spark-stores.md describes what each store can do."
    ),
    "JOB_CHANGED": _configuration(
        "Run the job with its original table and options. Or use a new job name and a different table. The new job "
        "reads the topics from the start."
    ),
    "OUTPUT_MISSING": _configuration(
        "Restore the table together with the positions. Or use a new job name. The new job reads the topics from the "
        "start."
    ),
    "OUTPUT_UNAVAILABLE": Reason(
        UnavailableError,
        "UNAVAILABLE",
        "Nothing was lost. Correct the cause that the error names: the disk, the network, a lock or the server. A "
        "running job or consumer retries automatically. If it has ended, start it again.",
        500,
    ),
    "POSITION_CHANGED": Reason(
        UnavailableError,
        "ABORTED",
        "Another run of this job moved the position first, so this run wrote nothing. Continue from the new position.",
        0,
    ),
    "POSITION_RESET": Reason(
        FencedError,
        "ABORTED",
        "An operator has reset the job's position. Start the job again. The job continues from the new position.",
    ),
    "POSITION_WENT_BACK": Reason(
        DataLossError,
        "DATA_LOSS",
        "The job's database lacks positions that this run has committed. The cause may be a restored backup. Start "
        "the job again. The job writes the rows that the database lacks.",
    ),
    # The Spark sink.
    "AMBIGUOUS_IDENTITY": _invalid(
        "Several rows of one message need different identities. Otherwise, all rows of the message except the "
        "first row would be dropped as duplicates. Number the rows in a column __ordinal that depends only on the "
        "message (use posexplode), or give each row a deduplicationId."
    ),
    "IDS_FORGOTTEN": Reason(
        DataLossError,
        "FAILED_PRECONDITION",
        "Nothing was written. Raise the topic's deduplication_window_… so that the window lasts longer than the "
        "longest pause of the query. To continue immediately, set failOnForgottenIds = false. With this option, "
        "some rows may be stored twice.",
    ),
    # Services.
    "CONSUMER_CHANGED": _configuration(
        "Two consumers need different names. Give each consumer a different name. If you only renamed the handler "
        "of this consumer, pass the consumer's old purpose: Consumer(…, purpose=…)."
    ),
    "HANDLER_FAILED": _configuration(
        "Correct the handler, and start the consumer again. The consumer continues with this message. "
        "docs/guides/consumer.md describes how to set failing messages aside."
    ),
    "TRANSACTION_ENDED": _configuration(
        "The handler's earlier changes may be committed without the position. If they are, the restarted consumer "
        "repeats these changes. Remove COMMIT, ROLLBACK and DDL from the handler."
    ),
    "NOT_TRANSACTIONAL": _configuration(
        "Use an engine without AUTOCOMMIT. The tables must have transactions and survive a crash. Run ALTER TABLE "
        "… ENGINE = InnoDB in MariaDB, or ALTER TABLE … SET LOGGED in PostgreSQL."
    ),
    "INVALID_VERSION": _invalid(
        "Give every message a key and a version of at least 0. Use each version of a key in only one message."
    ),
    "INTERNAL": Reason(SeqdedupeError, "INTERNAL", "Report this defect. Include the sidecar's log."),
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
