"""Load on a topic while its sidecar is killed, and the comparison with the log afterwards."""

import itertools
import random
import threading
import time
from collections import defaultdict

import grpc

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import publish_pb2
from tests.broker_sidecar.calls import UNKNOWN, Client, batch, names_of, record_rows, verdicts

MAX_IN_FLIGHT = 12
"""Frames sent and not answered."""

LONGEST_RUN = 12
"""Rows of one producer in a frame."""

FORGOTTEN = 15
"""This many receipts a producer are lost, at most, when its connection breaks."""

LONGEST_WAIT_SECONDS = 0.3
"""Before a kill."""

RESTING_SECONDS = 0.002
"""Between frames: the machine is shared with the sidecar that is to be killed in the middle of its work."""


class Publisher(threading.Thread):
    """Several producers in shared frames on one stream, which keeps to a client's whole duty.

    It loses receipts on purpose when the connection breaks, and resends what they were for. Ids have gaps.
    """

    def __init__(self, address: str, topic: str, names: list[str], seed: int) -> None:
        super().__init__(daemon=True)
        self.ids: dict[str, list[int]] = {name: [] for name in names}
        """Every ID ever sent, in order."""
        self.verdicts = [0, 0, 0, 0]
        self.failure: BaseException | None = None
        self._address, self._topic = address, topic
        self._epochs: list[int] = []
        self._done = dict.fromkeys(names, 0)
        """How many of the IDs have a receipt, from the first one on."""
        self._rng = random.Random(seed)
        self._stopping = threading.Event()

    def run(self) -> None:
        try:
            while not self._stopping.is_set() or any(self._done[n] < len(ids) for n, ids in self.ids.items()):
                try:
                    self._session()
                except grpc.RpcError as e:
                    if e.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                        raise
        except BaseException as e:
            self.failure = e
            raise

    def finish(self) -> None:
        """Makes nothing new; returns when all has a receipt."""
        self._stopping.set()
        self.join(LAST_RESORT_SECONDS)
        assert not self.is_alive()
        assert self.failure is None, self.failure

    def _session(self) -> None:
        client = Client(self._address)
        try:
            opened = client.open(self._topic, *self.ids, epochs=self._epochs)
            self._epochs = list(opened.epochs)
            for name, persisted in zip(self.ids, opened.persisted, strict=True):
                # What has a receipt is in the log, no matter what happened since.
                assert persisted >= max(self.ids[name][: self._done[name]], default=-1)
                self._done[name] = max(0, self._done[name] - self._rng.randrange(FORGOTTEN))
            self._stream(client)
        finally:
            client.close()

    def _stream(self, client: Client) -> None:
        epochs = dict(zip(self.ids, self._epochs, strict=True))
        at = dict(self._done)
        stream = client.stream(self._topic)
        waiting: dict[int, tuple[dict[str, int], int]] = {}
        while True:
            while len(waiting) < MAX_IN_FLIGHT:
                links = {name: self.ids[name][first - 1] if first else -1 for name, first in at.items()}
                rows = self._next(at)
                if not rows:
                    break
                waiting[stream.send(batch(rows, epochs, links))] = (dict(at), len(rows))
                time.sleep(RESTING_SECONDS)
            if not waiting:
                stream.end()
                return
            frame, (ends, count) = next(iter(waiting.items()))
            answer = stream.answer(frame)
            if isinstance(answer, publish_pb2.Refusal):
                assert answer.retry_delay_ms >= 0, answer
                time.sleep(answer.retry_delay_ms / 1000)
                return
            found = verdicts(answer, count)
            for verdict in found:
                self.verdicts[verdict] += 1
            if UNKNOWN in found:
                return
            del waiting[frame]
            self._done.update(ends)

    def _next(self, at: dict[str, int]) -> list[tuple[str, int]]:
        """Rows of a frame, old ones first, the producers mixed; moves `at`."""
        runs = []
        for name, ids in self.ids.items():
            count = self._rng.randrange(LONGEST_RUN + 1)
            while len(ids) < at[name] + count and not self._stopping.is_set():
                ids.append((ids[-1] if ids else -1) + self._rng.choice((1, 1, 1, 2, 7)))
            if self._stopping.is_set():
                count = LONGEST_RUN
            run = ids[at[name] : at[name] + count]
            at[name] += len(run)
            runs.append([(name, i) for i in run])
        return [row for rows in itertools.zip_longest(*runs) for row in rows if row is not None]


def kill_at_random_moments(sidecar: Sidecar, publishers: list[Publisher], kills: int, seed: int) -> None:
    """kill -9, and start again, this many times, at a random moment after each publisher has got receipts again."""
    rng = random.Random(seed)
    for _ in range(kills):
        before = [sum(publisher.verdicts) for publisher in publishers]
        while any(sum(p.verdicts) == b and p.failure is None for p, b in zip(publishers, before, strict=True)):
            time.sleep(0.001)
        time.sleep(rng.uniform(0.0, LONGEST_WAIT_SECONDS))
        sidecar.restart()


def stored_ids(address: str, topic: str, *, check_links: bool = True) -> dict[str, list[int]]:
    """The IDs in the log by producer name, in order. The links, as stored, prove that none is missing between them."""
    client = Client(address)
    found: dict[str, list[int]] = defaultdict(list)
    next_index = 0
    for record in client.records(topic):
        assert record.base_index == next_index
        next_index += record.rows
        links = dict(zip(names_of(record.batch), record.batch.previous_sequence_ids, strict=True))
        if check_links:
            assert links == {name: (found[name] or [-1])[-1] for name in links}
        for name, sequence_id in record_rows(record):
            found[name].append(sequence_id)
    client.close()
    return found


def compare(found: dict[str, list[int]], expected: dict[str, list[int]]) -> None:
    """The log holds exactly these IDs of each producer, each once, in order."""
    for name, ids in expected.items():
        missing, doubled = len(set(ids) - set(found[name])), len(found[name]) - len(set(found[name]))
        assert (missing, doubled) == (0, 0), name
        assert found[name] == ids
    assert found.keys() <= expected.keys()
