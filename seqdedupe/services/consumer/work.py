"""The work of a process: it passes messages to the handler, and sets aside the messages that the handler refuses. The
options come first, then one transaction, then `Work`."""

import inspect
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sqlalchemy import Connection, Engine, Row, text
from sqlalchemy.exc import DBAPIError

from seqdedupe.client.connection import Backoff
from seqdedupe.client.message import Message
from seqdedupe.client.route import OnWaiting
from seqdedupe.databases.failures import Fault, codes_of, fault_of, lost_connection
from seqdedupe.databases.tables import MARIADB, POSTGRESQL_UNSAFE_WRITES
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.names import topic_name
from seqdedupe.services.activity import Activity
from seqdedupe.services.consumer import database
from seqdedupe.services.consumer.database import (
    Lost,
    RowLease,
    check_mariadb_writes,
    not_transactional,
    reaching,
    refusing_writes,
)
from seqdedupe.services.consumer.dead_letters import BEHIND, SetAside, key_hash, message_of, why
from seqdedupe.services.consumer.message_arrivals import Stop

Poison = Literal["stop", "dead letter", "retry later"]

_HINT = "docs/guides/consumer.md lists the options of a consumer."


@dataclass(frozen=True, slots=True)
class ConsumerConfig:
    """Options for the size of a transaction, and for the handling of a message that the handler refuses."""

    max_batch_messages: int = 1000
    """The maximum number of messages in a transaction. A transaction never waits for more messages than have
    arrived."""

    longest_transaction_ms: int = 5_000
    """After this time, a transaction accepts no further message. A call of the handler is not interrupted; with
    `in_batches` the next call gets fewer messages."""

    max_attempts: int = 5
    """The number of immediate attempts after which a message counts as poison. All later messages wait during these
    attempts."""

    first_backoff_ms: int = 100
    """The pause before the second attempt. Each later pause is twice as long, up to `longest_backoff_ms`."""

    longest_backoff_ms: int = 5_000

    poison: Poison = "stop"
    """The handling of a poison message: stop the consumer, or move the message to the dead letters, or park the message
    to try it again later. Later messages with the same key wait for a parked message."""

    dead_letter_topic: str = ""
    """The topic of deduplication IDs to which dead letters are published. Without a topic, they stay in the table until
    a person handles them."""

    max_retries: int = 10
    """With "retry later": the number of retries after which the message becomes a dead letter."""

    first_retry_delay_ms: int = 1_000
    """The time until the first retry. Each later delay is twice as long, up to `longest_retry_delay_ms`."""

    longest_retry_delay_ms: int = 600_000

    def __post_init__(self) -> None:
        if self.poison not in ("stop", "dead letter", "retry later"):
            what = f"poison is {self.poison!r}: it should be 'stop', 'dead letter' or 'retry later'"
            raise error("INVALID_OPTION", what, hint=_HINT)
        if self.dead_letter_topic:
            topic_name(self.dead_letter_topic)
        for name in ("max_batch_messages", "longest_transaction_ms", "max_attempts", "max_retries"):
            if getattr(self, name) < 1:
                raise error("INVALID_OPTION", f"{name} is {getattr(self, name)}: it should be 1 or more", hint=_HINT)
        for name in ("first_backoff_ms", "longest_backoff_ms", "first_retry_delay_ms", "longest_retry_delay_ms"):
            if getattr(self, name) < 0:
                raise error("INVALID_OPTION", f"{name} is {getattr(self, name)}: it cannot be negative", hint=_HINT)

    def backoff_ms(self, failures: int) -> int:
        """Return the pause after this number of failed immediate attempts."""
        return _doubled(self.first_backoff_ms, failures, self.longest_backoff_ms)

    def retry_delay_ms(self, retries: int) -> int:
        """Return the time until the next retry, after this number of retries."""
        return _doubled(self.first_retry_delay_ms, retries + 1, self.longest_retry_delay_ms)


def _doubled(first: int, times: int, most: int) -> int:
    # The exponent is limited; otherwise the number would become huge after a year of attempts.
    return int(min(first << min(times - 1, 32), most))


# -- One transaction: the effects of the handler, and the position that records them.

_MARK = text("SAVEPOINT seqdedupe_begun")
_CHECK = text("RELEASE SAVEPOINT seqdedupe_begun")

_NO_MARK_STATES = frozenset(("3B001", "25P01"))
_NO_MARK_NUMBER = 1305
_NO_MARK_TEXT = "no such savepoint"
"""The texts with which PostgreSQL, MariaDB and SQLite report that the savepoint does not exist any more, and so the
transaction has ended."""


def carry_out(
    engine: Engine, ownership: RowLease, position: str, refused: frozenset[str], do: Callable[[Connection], str]
) -> str:
    """Run a transaction that calls `do`, and stores the position that `do` returns. Either all of this takes effect, or
    nothing. Return the new position.

    Raises Lost if another process was faster; Away if the database fails before `do` is called; TRANSACTION_ENDED if
    `do` itself has ended the transaction (by COMMIT, ROLLBACK, or a statement that commits, like DDL in MariaDB);
    NOT_TRANSACTIONAL.
    """
    with ExitStack() as stack:
        with reaching():
            connection = stack.enter_context(engine.connect())
            transaction = stack.enter_context(connection.begin())
            ownership.hold(connection, position)
            connection.execute(_MARK)
        with refusing_writes(connection, refused):
            to = do(connection)
        # A savepoint ends with its transaction: a transaction that was begun later does not have it.
        if not connection.invalidated and (not transaction.is_active or connection.closed):
            raise _ended()
        try:
            connection.execute(_CHECK)
        except DBAPIError as e:
            if _says_no_mark(e):
                raise _ended() from e
            raise
        if connection.dialect.name == "postgresql":
            for table, kind in connection.exec_driver_sql(POSTGRESQL_UNSAFE_WRITES):
                raise not_transactional(table, kind)
        if connection.dialect.name in MARIADB:
            check_mariadb_writes(connection)
        if to != position:
            ownership.move(connection, position, to)
    return to


def check_deferred(connection: Connection) -> None:
    """Check PostgreSQL's deferred constraints now, and raise the errors that the COMMIT would raise. The constraints
    stay deferred, because a rollback of the savepoint undoes the check and the effects of its triggers."""
    if connection.dialect.name == "postgresql":
        with connection.begin_nested() as look:
            connection.exec_driver_sql("SET CONSTRAINTS ALL IMMEDIATE")
            look.rollback()


def _ended() -> Exception:
    return error("TRANSACTION_ENDED", "the handler has ended the transaction")


def _says_no_mark(failure: DBAPIError) -> bool:
    state, number = codes_of(failure)
    return state in _NO_MARK_STATES or number == _NO_MARK_NUMBER or _NO_MARK_TEXT in str(failure.orig)


MAX_RETRIES_IN_A_ROW = 32
"""The maximum number of parked messages that are tried before new messages are handled again."""

REPEATS = 5
"""How often a transaction that is blocked by another transaction is repeated unchanged, before it is cut."""

LOST_ATTEMPTS = 3
"""If the connection ends in this number of attempts in which a message is alone, the message is the cause."""

FIRST_AWAY_SECONDS = 0.1
LONGEST_AWAY_SECONDS = 5.0
"""The first and the longest pause while the database cannot be used."""

_FATAL = frozenset(("TRANSACTION_ENDED", "NOT_TRANSACTIONAL", "INVALID_OPTION"))
"""Mistakes of a handler that do not depend on the message. It would not be safe to pass any other message to such a
handler."""


class _Failure(NamedTuple):
    """The failure of a transaction, while the database accepts other work."""

    cause: Exception
    fault: Fault


class Work:
    """The work from one position until the process loses the row. After the loss of the row, or after Away, a new
    `Work` begins at the stored position.

    Messages are in groups, one transaction for each group. A group that fails, for any reason, is cut in half until one
    message is alone. The consumer blames a message only if the message is alone in the transaction, and if the failure
    is not a failure of the database itself.
    """

    def __init__(
        self,
        engine: Engine,
        ownership: RowLease,
        handle: Callable[[Connection, Any], object],
        stop: Stop,
        config: ConsumerConfig,
        *,
        name: str,
        topic: str,
        position: str,
        in_batches: bool,
        refused: frozenset[str],
        on_waiting: OnWaiting | None,
        activity: Activity,
    ) -> None:
        self.position = position
        self._engine = engine
        self._ownership = ownership
        self._handle = handle
        self._stop = stop
        self._config = config
        self._name = name
        self._topic = topic
        self._in_batches = in_batches
        self._refused = refused
        self._on_waiting = on_waiting
        self._activity = activity
        self._parked = 0  # messages parked by the current transaction, which wait for earlier messages of their keys
        self._groups: deque[Sequence[Message]] = deque()
        # with in_batches: the number of messages that can be handled within the time of a transaction
        self._batch = config.max_batch_messages
        self._aside = SetAside(name, topic, topic_name(config.dead_letter_topic) if config.dead_letter_topic else None)
        self._kept_up = time.monotonic()
        # This is also needed if the option is no longer set: messages that were parked under it must be tried, in
        # order.
        with database.reaching():
            self._parks = config.poison == "retry later" or self._aside.has_parked(engine)

    @property
    def has_messages(self) -> bool:
        """Whether some of the messages passed to `take` are not applied yet."""
        return bool(self._groups)

    def take(self, messages: Sequence[Message]) -> None:
        """Add the next messages, to be applied after the messages that were added before."""
        if messages:
            self._groups.append(messages)

    def apply(self, more: Callable[[], Sequence[Message]]) -> None:
        """Run one transaction with the first group, or with the first messages of this group. If the transaction fails,
        handle the failure.

        `more` returns the messages that have arrived since the last call of `take`. Raises the errors of
        `Consumer.run`, for example HANDLER_FAILED. Also raises Lost, Away and Stopped.
        """
        group = self._groups[0]
        attempts = repeats = 0
        while True:
            done, failure = self._attempt(group)
            if failure is None:
                self._groups.popleft()
                if done < len(group):
                    self._groups.appendleft(group[done:])
                return
            if failure.fault is Fault.REPEAT and repeats < REPEATS:
                repeats += 1
                self._tell(failure.cause)
                self._pause(self._config.backoff_ms(repeats) / 1000)
                continue
            if len(group) > 1:
                middle = len(group) // 2
                self._groups[0] = group[middle:]
                self._groups.appendleft(group[:middle])
                return
            if failure.fault in (Fault.DATABASE, Fault.REPEAT):
                raise database.Away(failure.cause, f"; it takes other work, and not {self._shown(group)}")
            attempts += 1
            needed = self._config.max_attempts
            if attempts >= (needed if failure.fault is Fault.MESSAGE else max(needed, LOST_ATTEMPTS)):
                if done and failure.fault is Fault.MESSAGE and self._apply_together(more):
                    return
                self._give_up(group[0], failure.cause, attempts)
                self._groups.popleft()
                return
            self._pause(self._config.backoff_ms(attempts) / 1000)

    def _apply_together(self, more: Callable[[], Sequence[Message]]) -> bool:
        """Apply the first message together with later messages, and return whether that succeeded. Use this if the
        handler accepts the message, but the COMMIT fails when the message is alone. With deferred constraints, rows may
        refer to each other in a circle."""
        self.take(more())
        messages = [message for group in self._groups for message in group]
        # With `low` messages, the handler accepts them and the COMMIT fails. `high` is the first number for which there
        # are too few messages, or the handler refuses a message.
        low, high = 1, len(messages) + 1
        while low + 1 < high:
            some = messages[: min(2 * low, (low + high) // 2)]
            done, failure = self._attempt(some)
            if failure is None:
                self._groups = deque([messages[done:]] if done < len(messages) else [])
                return True
            if failure.fault in (Fault.DATABASE, Fault.REPEAT):
                raise database.Away(failure.cause, f"; in hand: {self._shown(some)}")
            if not done or failure.fault is Fault.UNKNOWN:
                high = len(some)
            elif done < len(some):  # more messages would take too long for a transaction
                break
            else:
                low = done
        return False

    def _attempt(self, messages: Sequence[Message]) -> tuple[int, _Failure | None]:
        """Run one transaction. Return the number of messages in the transaction. If the transaction failed, also return
        the reason."""
        done = 0

        def hand_over(connection: Connection) -> str:
            nonlocal done
            done = self._hand_over(connection, messages)
            return str(messages[done - 1].position)

        try:
            failure = self._transaction(hand_over, self._shown(messages))
        except SeqdedupeError as e:
            # In PostgreSQL none of the transaction's effects remain. The transaction is cut in half until one message
            # is identified.
            is_cut = e.reason == "NOT_TRANSACTIONAL" and self._engine.dialect.name == "postgresql"
            if not is_cut or len(messages) == 1:
                raise
            failure = _Failure(e, Fault.MESSAGE)
        if failure is None:
            self._activity.done(done - self._parked, set_aside=self._parked)
        elif failure.fault is Fault.MESSAGE:
            self._activity.failures["HANDLER_FAILED"] += 1
        return done, failure

    def _transaction(self, do: Callable[[Connection], str], shown: str) -> _Failure | None:
        began = time.monotonic()
        try:
            self.position = carry_out(self._engine, self._ownership, self.position, self._refused, do)
        except (Lost, database.Away):
            raise
        except Exception as e:
            if isinstance(e, SeqdedupeError) and e.reason in _FATAL:
                raise error(e.reason, f"{e.message}; in hand: {shown}", hint=e.hint) from e
            return _Failure(e, self._fault(e, began, shown))
        return None

    def _fault(self, failure: Exception, began: float, shown: str) -> Fault:
        """Find the cause of a failure, as soon as the database accepts other work. Raises Away if the cause is the
        database itself and it accepts no work; Lost, Stopped."""
        fault = fault_of(failure)
        if fault in (Fault.MESSAGE, Fault.REPEAT):
            return fault
        is_lost = lost_connection(failure)
        backoff = Backoff(FIRST_AWAY_SECONDS, LONGEST_AWAY_SECONDS)
        while True:
            try:
                with database.reaching():
                    self._ownership.write()
                    with self._engine.connect() as connection:
                        age_seconds = database.age_seconds(connection)
                break
            except database.Away:
                if not is_lost:
                    raise database.Away(failure, f"; in hand: {shown}") from failure
                # This message may have caused the server to end: its attempts are counted here.
                self._tell(failure, f"; in hand: {shown}")
                self._stop.pause(backoff.next_seconds())
        if is_lost and age_seconds < time.monotonic() - began:
            raise database.Away(failure, f"; the server was restarted, in hand: {shown}") from failure
        return Fault.UNKNOWN if is_lost else fault

    def _hand_over(self, connection: Connection, messages: Sequence[Message]) -> int:
        """Pass messages to the handler until the time has passed. Return the number of messages passed."""
        self._activity.runs()
        began = time.monotonic()
        most_seconds = self._config.longest_transaction_ms / 1000
        keys = self._aside.keys_parked(connection, messages) if self._parks else ()
        if self._in_batches:
            messages = messages[: self._batch]
            behind = [message for message in messages if keys and key_hash(message.key) in keys]
            others = [message for message in messages if not keys or key_hash(message.key) not in keys]
            if others:
                _check_result(self._handle(connection, others))
            took_seconds = time.monotonic() - began
            if took_seconds > most_seconds:
                self._batch = max(1, int(len(messages) * most_seconds / took_seconds))
            elif took_seconds < most_seconds / 2:
                self._batch = min(2 * self._batch, self._config.max_batch_messages)
            done = len(messages)
        else:
            behind, done = [], 0
            for message in messages:
                done += 1
                if keys and key_hash(message.key) in keys:
                    behind.append(message)
                else:
                    _check_result(self._handle(connection, message))
                if time.monotonic() - began >= most_seconds:
                    break
        self._parked = len(behind)
        if behind:
            self._aside.park(connection, behind, 0, BEHIND, None)
        return done

    def _give_up(self, message: Message, failure: Exception, attempts: int) -> None:
        what = (
            f"the consumer {self._name!r} cannot apply the message with index {message.index} of {self._topic} "
            f"({message.message_id}, tried {counted(attempts, 'time')}): {why(failure)}"
        )
        if self._config.poison == "stop":
            raise error("HANDLER_FAILED", what, index=message.index) from failure
        now_ms = _now_ms()

        def set_aside(connection: Connection) -> str:
            if self._config.poison == "dead letter":
                self._aside.bury(connection, message, attempts, why(failure), now_ms)
            else:
                next_ms = now_ms + self._config.retry_delay_ms(0)
                self._aside.park(connection, [message], attempts, why(failure), next_ms)
            return str(message.position)

        refused = self._insist(set_aside, message)
        if refused is None:
            self._activity.done(0, set_aside=1)
            return

        def set_aside_without_content(connection: Connection) -> str:
            self._aside.bury_without_content(connection, message, attempts, why(failure), why(refused.cause), now_ms)
            return str(message.position)

        last = self._insist(set_aside_without_content, message)
        if last is not None:
            raise error(
                "HANDLER_FAILED", f"{what}; nor set it aside: {why(last.cause)}", index=message.index
            ) from failure
        self._activity.done(0, set_aside=1)

    def _insist(self, set_aside: Callable[[Connection], str], message: Message) -> _Failure | None:
        """Set the message aside. Repeat this until it succeeds, or until the database permanently refuses it. Raises
        Away."""
        for attempts in range(1, LOST_ATTEMPTS + 1):
            failure = self._transaction(set_aside, self._shown([message]))
            if failure is None or failure.fault is Fault.MESSAGE:
                return failure
            if failure.fault is not Fault.UNKNOWN:
                raise database.Away(failure.cause, f"; it is to set aside {self._shown([message])}")
            self._pause(self._config.backoff_ms(attempts) / 1000)
        return failure

    def _shown(self, messages: Sequence[Message]) -> str:
        first, last = messages[0].index, messages[-1].index
        of = f"of {self._topic}"
        return f"the message with index {first} {of}" if first == last else f"the messages {first} to {last} {of}"

    def _tell(self, failure: Exception, more: str = "") -> None:
        if self._on_waiting is not None:
            self._on_waiting(database.Away(failure, more).failure)

    def keep_up(self) -> None:
        """At intervals, show that this process is alive, and try the parked messages that are due."""
        if time.monotonic() - self._kept_up < database.KEEP_UP_SECONDS:
            return
        self._kept_up = time.monotonic()
        with database.reaching():
            self._ownership.beat()
            if self._activity.reason == "OUTPUT_UNAVAILABLE":
                self._activity.runs()
            # A person may have parked a dead letter again.
            self._parks = self._parks or self._aside.has_parked(self._engine)
        if self._parks and self._retry_due():
            self._kept_up = 0.0  # there may be more parked messages that are due

    def finish(self) -> None:
        """Try the parked messages that are due until no more are due. Call this at the end of a run."""
        while self._retry_due():
            pass

    def _retry_due(self) -> bool:
        """Try some of the parked messages that are due, in the order of their times. Return whether there may be
        more."""
        for _ in range(MAX_RETRIES_IN_A_ROW):
            self._stop.check()
            with database.reaching():
                row = self._aside.next_due(self._engine, _now_ms())
            if row is None:
                return False
            self._retry(row)
        return True

    def _retry(self, row: Row[Any]) -> None:
        message = message_of(row)

        def again(connection: Connection) -> str:
            if self._aside.is_there(connection, row):
                _check_result(self._handle(connection, [message] if self._in_batches else message))
                self._aside.let_go(connection, row)
            return self.position

        shown = self._shown([message])
        failure = self._transaction(again, shown)
        if failure is None:
            self._activity.done(1)
            return
        if failure.fault in (Fault.DATABASE, Fault.REPEAT):
            raise database.Away(failure.cause, f"; in hand: {shown}")
        reason, now_ms, retries = why(failure.cause), _now_ms(), row.attempts - self._config.max_attempts + 1

        def put_back(connection: Connection) -> str:
            if not self._aside.is_there(connection, row):
                return self.position
            if retries >= self._config.max_retries:
                self._aside.bury(connection, message, row.attempts + 1, reason, now_ms)
                self._aside.let_go(connection, row)
            else:
                self._aside.again(connection, row, reason, now_ms + self._config.retry_delay_ms(max(retries, 0)))
            return self.position

        failure = self._transaction(put_back, shown)
        if failure is not None:
            with database.reaching():
                raise failure.cause

    def _pause(self, seconds: float) -> None:
        """Wait. During the wait, show that this process is alive, so that other processes do not take over."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._stop.pause(min(left, database.KEEP_UP_SECONDS))
            with database.reaching():
                self._ownership.beat()


def _check_result(result: object) -> None:
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise error(
            "INVALID_OPTION", "the handler has returned an awaitable", hint="Make the handler a plain function."
        )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
