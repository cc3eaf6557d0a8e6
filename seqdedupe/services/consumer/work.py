"""What the process that works does: messages to the handler, and those set aside that it cannot be brought to take."""

import inspect
import time
from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, Engine, Row

from seqdedupe.client.stored import Message
from seqdedupe.databases.failures import passes_by_itself
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import topic_name
from seqdedupe.services.consumer import database
from seqdedupe.services.consumer.config import ConsumerConfig
from seqdedupe.services.consumer.ownership import Lost, Ownership
from seqdedupe.services.consumer.set_aside import BEHIND, SetAside, key_hash, message_of, why
from seqdedupe.services.consumer.transaction import step
from seqdedupe.services.consumer.waiting import Stop

KEEP_UP_SECONDS = 1.0
"""So often, at most, the row says that this process lives, and the parked messages are looked at."""

MAX_RETRIES_IN_A_ROW = 32
"""Of parked messages, before the main flow has its turn."""


_FATAL = frozenset(("TRANSACTION_ENDED", "NOT_TRANSACTIONAL", "INVALID_OPTION"))
"""What a handler does wrong whatever the message is: no other one could be trusted to it."""


class Work:
    """From one position on, until the row is lost: after that, or Away, another one begins at the stored position."""

    def __init__(
        self,
        engine: Engine,
        ownership: Ownership,
        handle: Callable[[Connection, Any], object],
        stop: Stop,
        config: ConsumerConfig,
        *,
        name: str,
        topic: str,
        position: str,
        in_batches: bool,
        refused: frozenset[str],
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
        self._aside = SetAside(name, topic, topic_name(config.dead_letter_topic) if config.dead_letter_topic else None)
        self._kept_up = time.monotonic()
        # Also when that is no longer asked for: what was parked under it is to be tried, in its order.
        with database.reaching():
            self._parks = config.poison == "retry later" or self._aside.has_parked(engine)

    def apply(self, messages: Sequence[Message]) -> None:
        """All of them, in their order, in as many transactions as it takes. Raises HANDLER_FAILED and what else
        `Consumer.run` does; Lost, Away, Stopped."""
        failure = self._attempt(messages)
        if failure is None:
            return
        if len(messages) > 1:
            middle = len(messages) // 2
            self.apply(messages[:middle])
            self._stop.check()
            self.apply(messages[middle:])
            return
        [message] = messages
        for failures in range(1, self._config.max_attempts):
            self._pause(self._config.backoff_ms(failures) / 1000)
            failure = self._attempt(messages)
            if failure is None:
                return
        self._give_up(message, failure)

    def _attempt(self, messages: Sequence[Message]) -> Exception | None:
        """One transaction with all of them; returns why it failed."""
        return self._transaction(str(messages[-1].position), lambda connection: self._hand_over(connection, messages))

    def _transaction(self, to: str, do: Callable[[Connection], None]) -> Exception | None:
        try:
            with step(self._engine, self._ownership, self.position, to, self._refused) as connection:
                do(connection)
        except Lost:
            raise
        except Exception as e:
            if isinstance(e, SeqdedupeError) and e.reason in _FATAL:
                raise
            if passes_by_itself(e):
                raise database.Away(e) from e
            return e
        self.position = to
        return None

    def _hand_over(self, connection: Connection, messages: Sequence[Message]) -> None:
        if self._parks:
            keys = self._aside.keys_parked(connection, messages)
            if keys:
                behind = [message for message in messages if key_hash(message.key) in keys]
                self._aside.park(connection, behind, 0, BEHIND, None)
                messages = [message for message in messages if key_hash(message.key) not in keys]
        if self._in_batches:
            if messages:
                _check_result(self._handle(connection, list(messages)))
            return
        for message in messages:
            _check_result(self._handle(connection, message))

    def _give_up(self, message: Message, failure: Exception) -> None:
        attempts = self._config.max_attempts
        if self._config.poison == "stop":
            raise error(
                "HANDLER_FAILED",
                f"the consumer {self._name!r} cannot apply the message with index {message.index} of {self._topic} "
                f"({message.message_id}, tried {attempts} times): {why(failure)}",
                index=message.index,
            ) from failure
        now_ms = _now_ms()

        def set_aside(connection: Connection) -> None:
            if self._config.poison == "dead letter":
                self._aside.bury(connection, message, attempts, why(failure), now_ms)
            else:
                next_ms = now_ms + self._config.retry_delay_ms(0)
                self._aside.park(connection, [message], attempts, why(failure), next_ms)

        self._must(self._transaction(str(message.position), set_aside))

    def keep_up(self) -> None:
        """From time to time: says that this process lives, and tries again what is parked and due."""
        if time.monotonic() - self._kept_up < KEEP_UP_SECONDS:
            return
        self._kept_up = time.monotonic()
        with database.reaching():
            self._ownership.beat()
            # A person may have parked a dead letter again.
            self._parks = self._parks or self._aside.has_parked(self._engine)
        if self._parks and self._retry_due():
            self._kept_up = 0.0  # there may be more

    def finish(self) -> None:
        """At the end of a run: tries what is parked and due until nothing more is."""
        while self._retry_due():
            pass

    def _retry_due(self) -> bool:
        """Some of them, in the order of their times; whether there may be more."""
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

        def again(connection: Connection) -> None:
            if self._aside.is_there(connection, row):
                _check_result(self._handle(connection, [message] if self._in_batches else message))
                self._aside.let_go(connection, row)

        failure = self._transaction(self.position, again)
        if failure is None:
            return
        reason, now_ms, retries = why(failure), _now_ms(), row.attempts - self._config.max_attempts + 1

        def put_back(connection: Connection) -> None:
            if not self._aside.is_there(connection, row):
                return
            if retries >= self._config.max_retries:
                self._aside.bury(connection, message, row.attempts + 1, reason, now_ms)
                self._aside.let_go(connection, row)
            else:
                self._aside.again(connection, row, reason, now_ms + self._config.retry_delay_ms(max(retries, 0)))

        self._must(self._transaction(self.position, put_back))

    @staticmethod
    def _must(failure: Exception | None) -> None:
        if failure is not None:
            with database.reaching():
                raise failure

    def _pause(self, seconds: float) -> None:
        """Others must not take over while it waits to try again."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            self._stop.pause(min(left, KEEP_UP_SECONDS))
            with database.reaching():
                self._ownership.beat()


def _check_result(result: object) -> None:
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise error("INVALID_OPTION", "the handler has returned an awaitable", hint="Make it a plain function.")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
