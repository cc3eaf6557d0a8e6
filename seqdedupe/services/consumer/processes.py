"""The processes that share a consumer of a partitioned topic: which of them live, and what is whose."""

import time
import uuid
from collections import Counter
from collections.abc import Collection, Iterable
from functools import partial

from sqlalchemy import Connection, Engine, delete, insert, select, update

from seqdedupe.client.waiting import OnWaiting
from seqdedupe.errors import UnavailableError
from seqdedupe.services.consumer import database, ownership, work
from seqdedupe.services.consumer.ownership import NOBODY, Held, Lost, Ownership
from seqdedupe.services.consumer.tables import CONSUMERS, PROCESSES


class Processes:
    """The rows of all processes of a consumer; this one has the row `token`."""

    def __init__(self, engine: Engine, consumer: str, on_waiting: OnWaiting | None = None) -> None:
        self.token = uuid.uuid4().hex
        self.shown: set[str] = set()
        """The others that have shown since this process began that they live."""
        self._engine = engine
        self._consumer = consumer
        self._all = PROCESSES.c.consumer == consumer
        self._mine = self._all & (PROCESSES.c.token == self.token)
        self._seen: dict[str, tuple[int, float]] = {}
        self._held: dict[str, Held] = {}
        self._on_waiting = on_waiting
        self._beat_at = float("-inf")

    def beat(self) -> None:
        """Tells the others that this process lives, if it is time for that."""
        if time.monotonic() - self._beat_at < work.KEEP_UP_SECONDS:
            return
        with self._engine.begin() as connection:
            if not self._touch(connection):
                row = {"consumer": self._consumer, "token": self.token, "beat": 0}
                connection.execute(insert(PROCESSES).values(row))
        self._beat_at = time.monotonic()

    def hold(self, connection: Connection) -> None:
        """To the end of the transaction nobody takes this process for dead, however long that takes. Raises Lost if
        somebody has."""
        if not self._touch(connection):
            self._beat_at = float("-inf")
            raise Lost
        self._beat_at = time.monotonic()

    def _touch(self, connection: Connection) -> bool:
        moved = update(PROCESSES).where(self._mine).values(beat=PROCESSES.c.beat + 1)
        return connection.execute(moved).rowcount == 1

    def living(self) -> set[str]:
        """All that live, by their tokens. One whose row has said nothing for `TAKE_OVER_SECONDS`, by this process's
        clock, loses it: should it live after all, its next transaction fails."""
        with self._engine.begin() as connection:
            tokens = set(connection.execute(select(PROCESSES.c.token).where(self._all)).scalars())
            # A row that is locked is that of a process within a transaction, where the database can tell.
            idle = select(PROCESSES.c.token, PROCESSES.c.beat).where(self._all).with_for_update(skip_locked=True)
            beats: dict[str, int] = {row.token: row.beat for row in connection.execute(idle)}
        now, before = time.monotonic(), self._seen
        self._held = {token: self._held.get(token, Held(self._on_waiting)) for token in tokens}
        for token, held in self._held.items():
            held.look(token not in beats, partial(self._holder, token))
        self.shown |= tokens.difference(beats)
        self.shown |= {token for token, beat in beats.items() if token in before and before[token][0] != beat}
        # Since when each of these has said nothing.
        self._seen = {
            token: before[token] if token in before and before[token][0] == beat else (beat, now)
            for token, beat in beats.items()
            if token != self.token
        }
        for token, (beat, since) in self._seen.items():
            if now - since >= ownership.TAKE_OVER_SECONDS and self._remove(token, beat):
                tokens.discard(token)
        self.shown &= tokens
        return tokens

    def _holder(self, token: str) -> UnavailableError:
        values = {"token": token, "consumer": self._consumer}
        return database.holder(self._engine, PROCESSES, "t.token = :token AND t.consumer = :consumer", values)

    def _remove(self, token: str, beat: int) -> bool:
        unchanged = self._all & (PROCESSES.c.token == token) & (PROCESSES.c.beat == beat)
        with self._engine.begin() as connection:
            return connection.execute(delete(PROCESSES).where(unchanged)).rowcount == 1

    def leave(self) -> None:
        """Gives back all that this process has, so that the others need not wait."""
        with self._engine.begin() as connection:
            theirs = {"owner": NOBODY, "beat": CONSUMERS.c.beat + 1}
            connection.execute(update(CONSUMERS).where(CONSUMERS.c.owner == self.token).values(theirs))
            connection.execute(delete(PROCESSES).where(self._mine))


def fair_share(token: str, living: Collection[str], owners: Iterable[str], partitions: int) -> int:
    """How many partitions a process is to have. All of them together have all; who has more already keeps the odd one,
    so that nothing moves without need."""
    has = Counter(owners)
    order = sorted({token, *living}, key=lambda one: (-has[one], one))
    each, odd = divmod(partitions, len(order))
    return each + (order.index(token) < odd)


class PartOwnership(Ownership):
    """The hold on a partition's row by a process that lives as long as its own row says so."""

    def __init__(self, engine: Engine, name: str, processes: Processes) -> None:
        super().__init__(engine, name, processes.token)
        self._processes = processes

    def hold(self, connection: Connection, position: str) -> None:
        self._processes.hold(connection)
        super().hold(connection, position)

    def beat(self) -> None:
        self._processes.beat()
