"""Attacks on a sidecar from its edges: on the newest file of its journal, by its clock, by callers with narrow rights.

    python -m tests.kernels tests.broker_sidecar.edges_campaign --cases 100 --seed 1

Each case has its own oracle. It goes by what was acknowledged, and by what the documentation says may be lost.
"""

import argparse
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from math import exp, inf, log
from pathlib import Path
from typing import Any

import grpc

from seqdedupe.format.headers import key_of
from seqdedupe.format.journal import HEAD_BYTES, rounds_in
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import admin_pb2, batch_pb2
from tests.broker_sidecar import edge_sidecar
from tests.broker_sidecar.calls import DUP, NOT_DUP, TIMEOUT_SECONDS, Client, batch, receipt_of, status, verdicts
from tests.broker_sidecar.narrow_callers import attack_by_callers

TOPICS = ("a", "b", "c", "d")


def payload(sequence_id: int) -> bytes:
    """A payload that belongs to this ID alone, of any size up to some hundred bytes. None of them is zero, as what a
    power cut took from a file is."""
    return b"%d/" % sequence_id + b"." * (sequence_id * 37 % 500)


@dataclass
class Published:
    """A topic, and what one producer has published there: the IDs from 0 on, each at the index of the same number."""

    name: str
    handed_over: int = 0
    acknowledged: list[int] = field(default_factory=list)
    """For each message, how long the file of syncs was when its receipt was there."""

    def frame(self, rows: int, epochs: dict[str, int]) -> batch_pb2.Batch:
        """The next messages."""
        ids = range(self.handed_over, self.handed_over + rows)
        self.handed_over += rows
        return batch([("p", i) for i in ids], epochs, payloads=[payload(i) for i in ids])

    def read(self, client: Client, first: int = 0) -> int:
        """Return the number of messages up to the end. Raises AssertionError unless each is there once, in order."""
        at = first
        for record in client.records(self.name, index=first):
            stored, ends = record.batch, record.batch.payload_offsets
            for place, sequence_id in enumerate(stored.sequence_ids):
                assert (record.base_index + place, sequence_id) == (at, at), (
                    f"{self.name}: {sequence_id} stands at {at}"
                )
                assert stored.payloads[ends[place] : ends[place + 1]] == payload(at)
                at += 1
        return at


def state_of(client: Client, name: str) -> admin_pb2.Topic:
    """The topic, as soon as it has become what it becomes after a start."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while (topic := client.topic(name)).state == admin_pb2.TOPIC_STATE_RECOVERING:
        assert time.monotonic() < until
        time.sleep(0.01)
    return topic


@contextmanager
def calling(sidecar: Sidecar) -> Iterator[Client]:
    client = Client(sidecar.address)
    try:
        yield client
    finally:
        client.close()


# -- the newest file of the journal ----------------------------------------------------------------------------------


PLACE_BYTES = 32
"""What a part has in the table of its round."""
DAMAGE = ("nothing", "removed", "emptied", "torn", "zeroed", "all zeroed", "changed")


class JournalAttack:
    """kill -9 while the journal is written, often a power cut as well, and something happens to its newest file.

    What the journal has confirmed is there, or the topic is refused with a word about the journal. Only a file that is
    cut after its first round, or zeroed from a later head or in its last round on, may be what a power cut left before
    that round was confirmed: what was confirmed from there on may be gone after a power cut.
    """

    def __init__(self, folder: Path, seed: int, bug: str = "", *, is_worst: bool = False) -> None:
        self._random = random.Random(seed)
        self._is_worst = is_worst
        """All that was not synced is gone each time, and the newest file with it."""
        self._logs = folder / "data" / "logs"
        self._syncs = edge_sidecar.syncs(folder)
        self._topics = [Published(name) for name in TOPICS]
        # In the worst case nothing of the journal is forgotten meanwhile.
        forgets = {"idle_seconds": 3600, "journal_file_bytes": 2**24} if is_worst else {"idle_seconds": 0.3}
        self.sidecar = Sidecar(folder, **edge_sidecar.settings(folder, bug, **forgets))
        self._life_from = 0
        """How long the file of syncs was when the sidecar was started last."""
        self.refused = 0

    def case(self) -> str:
        """Return what was done."""
        self._publish(self._random.randint(1, 12))
        self.sidecar.kill()
        is_cut = self._is_worst or self._random.random() < 0.8
        if is_cut:
            self._cut_the_power()
        how, kept, file, may_be_torn = self._damage()
        sizes = self._sizes(file)
        is_damaged = kept < max((size for _, size in sizes), default=0)
        is_noticed = not sizes or kept < sizes[0][1] or not may_be_torn
        confirmed_until = next((at for at, size in sizes if size > kept), inf)
        for topic in self._topics:
            may_be_gone = is_cut and is_damaged and not is_noticed
            topic.acknowledged = [at for at in topic.acknowledged if not may_be_gone or at < confirmed_until]
        refused = self._start(is_damaged or how in ("zeroed", "all zeroed", "changed"))
        if refused:
            self.refused += 1
            self._give_up(refused)
        found = f"{len(refused)} refused" if refused else "all there"
        return f"{how} from {kept}{', power cut' if is_cut else ''}: {found}"

    def _publish(self, rounds: int) -> None:
        """At least this many rounds of the journal; the last messages are handed over, and nobody waits for them."""
        before = self._syncs.stat().st_size
        with calling(self.sidecar) as client:
            epochs = {topic.name: client.epochs(topic.name, "p") for topic in self._topics}
            streams = {topic.name: client.stream(topic.name) for topic in self._topics}
            until = time.monotonic() + LAST_RESORT_SECONDS
            while self._syncs.read_bytes()[before:].count(b".journal\n") < rounds:
                assert time.monotonic() < until
                sent = self._send(streams, epochs)
                for topic, frame in sent:
                    assert NOT_DUP in verdicts(receipt_of(streams[topic.name].answer(frame)), 1)
                    topic.acknowledged += [self._syncs.stat().st_size] * (topic.handed_over - len(topic.acknowledged))
            self._send(streams, epochs)
            time.sleep(self._random.uniform(0, 0.005))
            self.sidecar.kill()

    def _send(self, streams: dict[str, Any], epochs: dict[str, dict[str, int]]) -> list[tuple[Published, int]]:
        some = self._random.sample(self._topics, self._random.randint(2, len(self._topics)))
        frames = [(topic, topic.frame(self._random.randint(1, 3), epochs[topic.name])) for topic in some]
        return [(topic, streams[topic.name].send(frame)) for topic, frame in frames]

    def _sizes(self, file: Path | None) -> list[tuple[int, int]]:
        """The syncs of a file in the last life: where the line ends in the file of syncs, and how long the file was."""
        found, at = [], 0
        for line in self._syncs.read_bytes().splitlines(keepends=True):
            at += len(line)
            size, path = line.decode().split()
            if at > self._life_from and path == str(file):
                found.append((at, int(size)))
        return found

    def _cut_the_power(self) -> None:
        """For each segment nothing is sure but what was synced."""
        synced: dict[str, int] = {}
        for line in self._syncs.read_text().splitlines():
            size, path = line.split()
            synced[path] = max(int(size), synced.get(path, 0))
        for segment in self._logs.glob("*/*.log"):
            there, least = segment.stat().st_size, synced.get(str(segment), 0)
            assert least <= there
            left = self._random.choice((least, self._random.randint(least, there), there))
            os.truncate(segment, least if self._is_worst else left)

    def _damage(self) -> tuple[str, float, Path | None, bool]:
        """What was done to the newest file, how much of it is left, which it is, and whether a power cut before the
        sync of a round may leave the same."""
        file = max((self._logs / "journal").glob("*.journal"), default=None)
        if file is None:
            return "no file", inf, None, False
        raw = file.read_bytes()
        size, may_be_torn = len(raw), True
        how = "removed" if self._is_worst else self._random.choice(DAMAGE)
        kept = self._random.randrange(size) if how in ("torn", "zeroed", "changed") and size else 0
        match how:
            case "nothing":
                return how, inf, file, False
            case "removed":
                file.unlink()
            case "emptied" | "torn":
                file.write_bytes(raw[:kept])
            case "changed":
                other = bytes(byte ^ self._random.randint(1, 255) for byte in raw[kept : kept + 1])
                file.write_bytes(raw[:kept] + other + raw[kept + 1 :])
                may_be_torn = False
            case _:
                file.write_bytes(raw[:kept] + bytes(size - kept))
                may_be_torn = not self._changes_parts_of_an_earlier_round(raw, kept)
        return how, kept, file, may_be_torn

    def _changes_parts_of_an_earlier_round(self, raw: bytes, at: int) -> bool:
        """Whether zeros from this offset of the newest file on leave a round's head, and another round follows it."""
        begin = 0
        for found in rounds_in(raw, key_of((self._logs / "journal" / "secret").read_bytes())):
            if begin + HEAD_BYTES + len(found.parts) * PLACE_BYTES <= at < found.end:
                return found.end < len(raw) and any(raw[at : found.end])
            begin = found.end
        return False

    def _start(self, is_damaged: bool) -> list[Published]:
        """Starts, and looks at all topics. Return those that are refused."""
        self._restart()
        refused = []
        with calling(self.sidecar) as client:
            for topic in self._topics:
                found = state_of(client, topic.name)
                if found.state == admin_pb2.TOPIC_STATE_SERVING:
                    self._check(client, topic)
                    continue
                assert is_damaged, f"{topic.name}: {found.why}"
                assert "journal" in found.why
                refused.append(topic)
        return refused

    def _restart(self) -> None:
        self._life_from = self._syncs.stat().st_size
        self.sidecar.start()

    def _check(self, client: Client, topic: Published) -> None:
        there = topic.read(client)
        assert len(topic.acknowledged) <= there <= topic.handed_over, f"{topic}: {there} are there"
        assert client.producer(topic.name, "p")[1] == there - 1
        topic.handed_over, topic.acknowledged = there, topic.acknowledged + [0] * (there - len(topic.acknowledged))

    def _give_up(self, refused: list[Published]) -> None:
        """Each topic goes on with what it has, or says that something is missing."""
        self.sidecar.kill()
        self.sidecar.keys["give_up_journal"] = True
        self._restart()
        del self.sidecar.keys["give_up_journal"]
        with calling(self.sidecar) as client:
            for topic in self._topics:
                found = state_of(client, topic.name)
                if topic in refused:
                    topic.acknowledged = []
                if found.state == admin_pb2.TOPIC_STATE_DAMAGED:
                    assert topic in refused, f"{topic.name}: {found.why}"
                    assert "[LOG_DAMAGED]" in found.why
                    topic.name, topic.handed_over = f"{topic.name}-again", 0
                else:
                    self._check(client, topic)


def attack_journal(attack: JournalAttack, cases: int) -> JournalAttack:
    """This many cases. Raises AssertionError for what is gone and nobody says so."""
    with attack.sidecar:
        for number in range(cases):
            print(f"journal {number}: {attack.case()}", flush=True)
    return attack


# -- a clock that is wrong, and retention by time ----------------------------------------------------------------------

MINUTE_MS = 60_000
DAY_MS = 24 * 60 * MINUTE_MS
BELIEVED_MS = 39 * MINUTE_MS
"""A clock that was wrong for less than 40 minutes must not be believed. One minute is for what the looks are off."""
SPEED = 300
"""40 minutes are eight seconds."""
RETENTIONS = {"hour": 60, "week": 7 * 24 * 60}


@dataclass
class Aging(Published):
    """A topic with retention by time."""

    minutes: int = 0
    first: int = 0
    times: list[tuple[int, int]] = field(default_factory=list)
    """For each message, when it was published: by the true time, and by the clock, both at the earliest."""

    def may_go(self, believed_ms: float, now_ms: int) -> int:
        """The number of the oldest messages that are too old: by a time that was believed, or truly."""
        age_ms = self.minutes * MINUTE_MS
        old = (by_clock < believed_ms - age_ms or true < now_ms - age_ms for true, by_clock in self.times)
        return next((index for index, is_old in enumerate(old) if not is_old), len(self.times))


class ClockAttack:
    """Starts by clocks that are ahead or behind, and clocks that jump for a while. No message goes that is younger than
    the retention, by the true time or by one that a clock has said for 40 minutes."""

    def __init__(self, folder: Path, seed: int, bug: str = "", speed: int = SPEED) -> None:
        self._random = random.Random(seed)
        quick = edge_sidecar.Quick(time.monotonic_ns(), speed)
        self._time = edge_sidecar.Time(folder, quick)
        self._topics = [Aging(name, minutes=minutes) for name, minutes in RETENTIONS.items()]
        settings = edge_sidecar.settings(folder, bug, quick=quick)
        self.sidecar = Sidecar(folder, deduplication_entries_interval=5, **settings)
        self._believed_ms = -inf
        """The latest time that may have been believed since all topics were looked at."""
        self._known_ms = -inf
        """The latest time that may ever have been believed."""
        self._shift_ms = self._since_ms = 0
        """By how much the clock is wrong, and since when."""
        self.dropped = 0

    def case(self, ahead_ms: int | None = None) -> str:
        """Return what was done: one start, by a clock that is wrong by this much, and messages meanwhile."""
        self._shift(self._wrong_ms() if ahead_ms is None else ahead_ms)
        first_shift_ms, dropped = self._shift_ms, self.dropped
        self.sidecar.start()
        begun_ms = self._since_ms = self._time.begun_ms
        self._check_warning()
        with calling(self.sidecar) as client:
            for topic in self._topics:
                if not topic.times:
                    policy = admin_pb2.TopicPolicy(retention_time_in_minutes=topic.minutes)
                    client.admin.CreateTopic(admin_pb2.CreateTopicRequest(topic=topic.name, policy=policy))
                state_of(client, topic.name)
            self._go_on(client, self._random.choice((0.5, 1.0, 2.0, 4.0, 9.0, 14.0)) if ahead_ms is None else 1.5)
            if ahead_ms is None and self._random.random() < 0.4:
                self._shift(self._wrong_ms())
                self._go_on(client, self._random.uniform(0.2, 5.0))
                self._shift(first_shift_ms)
                self._since_ms = begun_ms
                self._go_on(client, self._random.uniform(0.2, 5.0))
        self.sidecar.kill() if self._random.random() < 0.7 else self.sidecar.stop()
        # What was dropped after the last look is found by the next case.
        self._believed_ms = -inf
        self._believe()
        minutes = (self._time.true_ms() - begun_ms) / MINUTE_MS
        return f"clock by {first_shift_ms / DAY_MS:.3f} days, {minutes:.0f} minutes: {self.dropped - dropped} dropped"

    def give_way(self) -> None:
        """By a clock that is right all that was published before goes, also what was published while it was ahead."""
        self._shift(0)
        self.sidecar.start()
        hour, wanted = self._topics[0], len(self._topics[0].times)
        until = time.monotonic() + LAST_RESORT_SECONDS
        with calling(self.sidecar) as client:
            state_of(client, hour.name)
            while hour.first < wanted:
                assert time.monotonic() < until, f"{hour.first} of {wanted} have gone"
                self._go_on(client, 0.5)

    def _wrong_ms(self) -> int:
        """By how much a clock is wrong: not at all, by minutes to years, or all that there is."""
        if (kind := self._random.random()) < 0.2:
            return 0
        if kind < 0.25:
            return 1000 - self._time.true_ms()
        size_ms = exp(self._random.uniform(log(5 * MINUTE_MS), log(4000 * DAY_MS)))
        return int(size_ms) * self._random.choice((1, 1, -1))

    def _shift(self, ms: int) -> None:
        self._shift_ms, self._since_ms = ms, self._time.true_ms()
        self._time.shift(ms)

    def _believe(self) -> None:
        """The sidecar may believe the clock by now."""
        now_ms = self._time.true_ms()
        if now_ms - self._since_ms > BELIEVED_MS:
            self._believed_ms = max(self._believed_ms, now_ms + self._shift_ms)
            self._known_ms = max(self._known_ms, self._believed_ms)

    def _go_on(self, client: Client, seconds: float) -> None:
        """Messages for this long, a few at a time."""
        until = time.monotonic() + seconds
        epochs = {topic.name: client.epochs(topic.name, "p") for topic in self._topics}
        while time.monotonic() < until:
            for topic in self._topics:
                true_ms = self._time.true_ms()
                # Publish times never fall within a topic.
                by_clock = max(true_ms + self._shift_ms, topic.times[-1][1] if topic.times else 0)
                rows = self._random.randint(1, 10)
                receipt = client.publish_unary(topic.name, topic.frame(rows, epochs[topic.name]))
                assert verdicts(receipt, rows) == [NOT_DUP] * rows
                topic.times += [(true_ms, by_clock)] * rows
            self._check_first(client)
            time.sleep(self._random.uniform(0, 0.2))
        for topic in self._topics:
            assert self._read(client, topic) == len(topic.times)
            again = batch([("p", 0)], epochs[topic.name], payloads=[payload(0)])
            assert list(client.publish_unary(topic.name, again).verdicts) == [DUP]

    def _read(self, client: Client, topic: Aging) -> int:
        while True:
            try:
                return topic.read(client, client.topic(topic.name).first_index)
            except grpc.RpcError as e:
                if status(e).reason != "POSITION_TRIMMED":
                    raise
                # Retention was quicker.

    def _check_first(self, client: Client) -> None:
        """Nothing has gone that must not."""
        for topic in self._topics:
            first = client.topic(topic.name).first_index
            self._believe()
            now_ms = self._time.true_ms()
            if first > max(topic.first, gone := topic.may_go(self._believed_ms, now_ms)):
                true_ms, by_clock = topic.times[gone]
                ages = f"{(now_ms - true_ms) / MINUTE_MS:.0f} minutes, {(self._believed_ms - by_clock) / MINUTE_MS:.0f}"
                raise AssertionError(f"{topic.name} begins with {first}; the age of {gone} is {ages} by its clock")
            self.dropped += first - topic.first
            topic.first = first

    def _check_warning(self) -> None:
        """A clock that is more than a day ahead of all that was ever believed is reported at once."""
        if self.dropped and self._since_ms + self._shift_ms - self._known_ms > DAY_MS:
            told = [entry["event"] for entry in self.sidecar.log if "ahead of the time" in entry["event"]]
            assert told, f"nobody says that the clock is {self._shift_ms / DAY_MS:.1f} days ahead"
        self.sidecar.log.clear()


def attack_clock(attack: ClockAttack, shifts: Sequence[int | None]) -> ClockAttack:
    """This many starts, by clocks that are wrong by this much; None: at random. Raises AssertionError for what has gone
    and is too young."""
    with closing(attack.sidecar):
        for number, ahead_ms in enumerate(shifts):
            print(f"clock {number}: {attack.case(ahead_ms)}", flush=True)
    return attack


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        journal, clock, callers = (Path(folder) / name for name in ("journal", "clock", "callers"))
        for one in (journal, clock, callers):
            one.mkdir()
        refused = attack_journal(JournalAttack(journal, told.seed), told.cases).refused
        attack = attack_clock(ClockAttack(clock, told.seed), [None] * told.cases)
        with closing(attack.sidecar):
            attack.give_way()
        calls = attack_by_callers(callers, told.cases, told.seed).refused
    print(f"{refused} starts without a journal; {attack.dropped} messages dropped by age; {calls} calls refused")


if __name__ == "__main__":
    main()
