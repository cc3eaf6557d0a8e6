"""Another number of workers for a directory with topics: nothing is lost or doubled, wherever it was broken off."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from broker_sidecar import division
from broker_sidecar.config import Config
from broker_sidecar.division import MOVED, MOVING, change
from broker_sidecar.workers import count_of, divide
from seqdedupe.client import Client
from seqdedupe.errors import ConfigurationError, SeqdedupeError
from seqdedupe.files import locked_directory
from seqdedupe.log.embedded import log_folder
from seqdedupe.log.embedded.journal_replay import JournalReplay
from seqdedupe.names import shard_of
from seqdedupe.store import directories
from seqdedupe.store.db import Store
from seqdedupe.store.directories import SHARDS_FILE, WORKERS_FILE, of_worker, parts_of, read_claim
from seqdedupe.store.parts import TopicRecord, TopicState
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.topic.control import encode
from seqdedupe.topic.policy import Policy
from tests.broker_sidecar.test_workers import Resending, topics_of
from tests.client.helpers import ids_in_log
from tests.doctor.directories import Message, opened, segments
from tests.doctor.test_journal import TOPICS, AfterAPowerCut, cut

__all__ = ["cut"]

NAMES = [*topics_of(0, 3, 2), *topics_of(1, 3, 1), *topics_of(2, 3, 1)]
POLICY = encode(Policy(retention_size_in_mb=300))
NAMESPACE = "public/default"


class Held(NamedTuple):
    """What a directory has of a topic."""

    incarnation: int
    messages: list[Message]
    persisted: int


async def fill(directory: Path) -> None:
    """Topics with several segments, of which one has a snapshot; a policy of a namespace."""
    async with opened(directory) as data:
        for name in NAMES:
            for k in range(3):
                await data.publish(name, [("p", 2 * k), ("p", 2 * k + 1)], [b"%d" % k * 100, name.encode()])
        await data.topics.get(NAMES[0]).keeper.snapshot()
    store = Store.open(directory / "store")
    await store.put_namespace_policy(NAMESPACE, POLICY)
    store.close()


async def _held(directory: Path) -> dict[str, Held]:
    held: dict[str, Held] = {}
    for part in parts_of(directory):
        claim = read_claim(part)
        async with opened(part) as data:
            assert data.topics.store.namespace_policies() == [(NAMESPACE, POLICY)]
            for name, record in [(one.name, one) for one in data.topics.known_records()]:
                assert name not in held
                assert claim is None or shard_of(name) in claim.shards
                found = await data.messages(name), await data.persisted(name, "p")
                held[name] = Held(record.incarnation, *found)
    return held


def held(directory: Path) -> dict[str, Held]:
    """All topics of a directory, which is opened for that as sidecars open it."""
    return asyncio.run(_held(directory))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Held]]:
    """Directories with 1, 2 and 3 workers, which stay as they are, and what each holds."""
    folder = tmp_path_factory.mktemp("made")
    asyncio.run(fill(folder / "1"))
    for workers in (2, 3):
        shutil.copytree(folder / "1", folder / str(workers))
        change(folder / str(workers), workers)
    return folder, held(shutil.copytree(folder / "1", folder / "opened"))


class Broken(BaseException):
    """Instead of a step."""


class Steps:
    """Counts what is done to the disk, and raises in place of the step with a number."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, last: Callable[[], None]) -> None:
        self.count = 0
        self.end = 0
        self._last = last
        for owner, name in (
            (os, "rename"),
            (os, "replace"),
            (division, "sync_folder"),
            (directories, "write"),
            (shutil, "rmtree"),
            (Store, "put_topics"),
        ):
            monkeypatch.setattr(owner, name, self._counted(getattr(owner, name)))

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            self.count += 1
            if self.count == self.end:
                self._last()
            return function(*arguments, **keywords)

        return counted


def _break() -> None:
    raise Broken


CHANGES = [(1, 3, 3), (3, 1, 3), (2, 3, 2)]
"""From and to this many, and which of the steps are tried: each third, or second."""


@pytest.mark.parametrize(("workers", "to", "stride"), CHANGES)
def test_broken_off_at_any_step_it_goes_on(
    made: tuple[Path, dict[str, Held]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    to: int,
    stride: int,
) -> None:
    folder, before = made
    steps = Steps(monkeypatch, _break)
    end, is_broken = 0, True
    while is_broken:
        end += stride
        data = shutil.copytree(folder / str(workers), tmp_path / str(end))
        steps.count, steps.end = 0, end
        try:
            change(data, to)
            is_broken = False
        except Broken:
            is_broken = True
        steps.end = 0
        if is_broken and (split := directories.read_split(data)) and split.to is not None:
            with pytest.raises(ConfigurationError, match="on its way"):
                parts_of(data)
        change(data, to)
        assert held(data) == before
        assert parts_of(data) == [place for place, _ in division.places(data, to)]
        shutil.rmtree(data)
    assert end > 20


KILLED = """# may start warm
import os, signal, sys
from pathlib import Path
from broker_sidecar import kernels
kernels.prepare()
import pytest
from tests.broker_sidecar.test_dividing import Steps, change
steps = Steps(pytest.MonkeyPatch(), lambda: os.kill(os.getpid(), signal.SIGKILL))
steps.end = int(sys.argv[3])
change(Path(sys.argv[1]), int(sys.argv[2]))
"""


def test_killed_again_and_again_it_gets_there(made: tuple[Path, dict[str, Held]], tmp_path: Path) -> None:
    """kill -9, each time some steps further, and of what is left by then."""
    folder, before = made
    data = shutil.copytree(folder / "2", tmp_path / "data")
    for end in (3, 8, 16, 20):
        command = [sys.executable, "-c", KILLED, str(data), "3", str(end)]
        assert subprocess.run(command, timeout=LAST_RESORT_SECONDS).returncode == -signal.SIGKILL
    change(data, 3)
    assert held(data) == before


def test_control_named_moved_before_the_logs_are(
    made: tuple[Path, dict[str, Held]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another order what is broken off loses them: `moved` says that the old parts are not needed."""
    data = shutil.copytree(made[0] / "2", tmp_path / "data")
    assert segments_of(data)
    monkeypatch.setattr(division, "_move_logs", lambda *arguments: None)
    change(data, 3)
    assert not segments_of(data)
    with pytest.raises(SeqdedupeError):
        held(data)


def segments_of(data: Path) -> list[Path]:
    return sorted(data.glob("**/logs/*/*.log"))


@pytest.mark.parametrize("takes_back", [True, False])
async def test_what_the_journal_alone_holds_is_kept(
    cut: AfterAPowerCut, monkeypatch: pytest.MonkeyPatch, takes_back: bool
) -> None:
    """The control arm leaves the journal out."""
    if not takes_back:
        monkeypatch.setattr(JournalReplay, "take_back", lambda *arguments: None)
    await asyncio.to_thread(change, cut.directory, 2)
    found: dict[str, list[Message]] = {}
    for part in parts_of(cut.directory):
        async with opened(part) as data:
            found |= {name: await data.messages(name) for name in data.topics.registry.names()}
    assert ([found[name] for name in TOPICS] == cut.held) is takes_back


def _foreign(data: Path) -> None:
    (of_worker(data, 1) / "notes").write_text("mine")


def _linked(data: Path) -> None:
    logs = of_worker(data, 1) / "logs"
    logs.rename(data / "elsewhere")
    logs.symlink_to(data / "elsewhere")


def _without_record(data: Path) -> None:
    (of_worker(data, 1) / "logs" / "7").mkdir()


def _without_segments(data: Path) -> None:
    for path in segments(of_worker(data, 1)):
        path.rename(path.with_suffix(".away"))


def _without_claim(data: Path) -> None:
    (of_worker(data, 1) / SHARDS_FILE).unlink()


def _without_store(data: Path) -> None:
    (of_worker(data, 1) / "store").rename(data / "away")


def _with_target(data: Path) -> None:
    (of_worker(data, 2) / "logs").mkdir(parents=True)


def _with_moved(data: Path) -> None:
    (data / MOVED).mkdir()
    (data / MOVED / "notes").write_text("mine")


def _leaving(data: Path) -> None:
    log_folder.leave(segments(of_worker(data, 1))[0].parent, log_folder.To("elsewhere:6660", "00"))


def _arrived(data: Path) -> None:
    (segments(of_worker(data, 1))[0].parent / log_folder.ARRIVED_FILE).write_text("00")


def _not_served_elsewhere(data: Path) -> None:
    _leaving(data)
    log_folder.has_left(segments(of_worker(data, 1))[0].parent)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (_foreign, "INVALID_CONFIGURATION"),
        (_linked, "INVALID_CONFIGURATION"),
        (_with_target, "INVALID_CONFIGURATION"),
        (_with_moved, "INVALID_CONFIGURATION"),
        (_leaving, "INVALID_CONFIGURATION"),
        (_arrived, "INVALID_CONFIGURATION"),
        (_not_served_elsewhere, "INVALID_CONFIGURATION"),
        (_without_record, "STORE_MISSING"),
        (_without_claim, "STORE_MISSING"),
        (_without_store, "STORE_MISSING"),
        (_without_segments, "LOG_DAMAGED"),
    ],
)
def test_what_is_not_as_it_should_be_is_left_alone(
    made: tuple[Path, dict[str, Held]], tmp_path: Path, spoil: Callable[[Path], None], reason: str
) -> None:
    """The control arm is that the same directory is changed otherwise (`test_broken_off_at_any_step_it_goes_on`)."""
    data = shutil.copytree(made[0] / "2", tmp_path / "data")
    spoil(data)
    before, split = segments_of(data), directories.read_split(data)
    with pytest.raises(SeqdedupeError, match=reason):
        change(data, 3)
    assert segments_of(data) == before
    assert directories.read_split(data) == split
    assert not (data / MOVING).exists()


def test_one_that_another_sidecar_has_goes_along(made: tuple[Path, dict[str, Held]], tmp_path: Path) -> None:
    data = shutil.copytree(made[0] / "1", tmp_path / "data")
    gone = made[1][NAMES[0]].incarnation
    folder = data / "logs" / str(gone)
    log_folder.leave(folder, log_folder.To("elsewhere:6660", "00"))
    log_folder.has_left(folder)
    log_folder.remove_messages(folder)
    change(data, 2)

    async def refused() -> str:
        part = next(part for part in parts_of(data) if (part / "logs" / str(gone)).exists())
        async with opened(part) as found:
            with pytest.raises(SeqdedupeError) as raised:
                found.topics.get(NAMES[0])
        return f"{raised.value.reason} {raised.value.numbers['owner_address']}"

    assert asyncio.run(refused()) == "NOT_OWNER elsewhere:6660"


@pytest.mark.parametrize("has_store", [True, False])
def test_while_a_worker_runs_nothing_is_moved(
    made: tuple[Path, dict[str, Held]], tmp_path: Path, has_store: bool
) -> None:
    data = shutil.copytree(made[0] / "2", tmp_path / "data")
    worker = of_worker(data, 1)
    with locked_directory(worker):
        if not has_store:
            (worker / "store").rename(worker / "broken")
        with pytest.raises(SeqdedupeError, match="DIRECTORY_IN_USE"):
            change(data, 3)
        if not has_store:
            (worker / "broken").rename(worker / "store")
    store = Store.open(worker / "store")
    with pytest.raises(SeqdedupeError, match="DIRECTORY_IN_USE"):
        change(data, 3)
    assert directories.read_split(data) == directories.check_stays(data)
    store.close()
    change(data, 3)
    assert held(data) == made[1]


async def test_what_was_half_made_or_half_deleted_is_gone_and_its_incarnation_is_not_given_again(
    made: tuple[Path, dict[str, Held]], tmp_path: Path
) -> None:
    folder, before = made
    data = shutil.copytree(folder / "1", tmp_path / "data")
    store = Store.open(data / "store")
    late = store.next_incarnation(1 << 60)
    await store.put_topics(TopicRecord("persistent://public/default/half", late, TopicState.CREATING, bytes(16)))
    gone = next(record for record in store.topics() if record.name == NAMES[0])
    await store.put_topics(replace(gone, state=TopicState.DELETING))
    store.close()
    await asyncio.to_thread(change, data, 2)
    found = await _held(data)
    assert found == {name: one for name, one in before.items() if name != NAMES[0]}
    for part in parts_of(data):
        store = Store.open(part / "store")
        assert store.next_incarnation(0) > late
        store.close()


async def test_sidecars_with_one_three_and_one_process_go_on(tmp_path: Path) -> None:
    """The first is killed, and what was published in its sessions is sent again to the next ones; the control arm is a
    topic without deduplication (`Resending`)."""
    names = [topics_of(worker, 3, 3)[2] for worker in range(3)]
    with Sidecar(tmp_path) as sidecar:
        resending = Resending(sidecar.address, *topics_of(0, 3, 2))
        await publish(sidecar, names)
    with Sidecar(tmp_path, workers=3) as sidecar:
        resending.address = sidecar.address.split(",")[0]
        assert resending.ids_after_that() == [[0, 1, 2], [0, 1, 2] * 2]
        await publish(sidecar, names)
        # For workers that are killed it is not known when they have released their directories.
        assert sidecar.stop() == 0
    config = Config(data_directory=str(sidecar.data), workers=1)
    await asyncio.to_thread(divide, config, count_of(config))
    with Sidecar(tmp_path) as sidecar:
        resending.address = sidecar.address
        assert resending.ids_after_that() == [[0, 1, 2], [0, 1, 2] * 3]
        await publish(sidecar, names)
        for name in names:
            assert await ids_in_log(sidecar, name) == list(range(30))
        assert sidecar.stop() == 0
    assert not (sidecar.data / WORKERS_FILE).exists()


async def publish(sidecar: Sidecar, names: list[str]) -> None:
    """Ten more messages to each topic."""
    async with Client(sidecar.address) as client:
        for name in names:
            async with client.producer(name, "p") as producer:
                await asyncio.gather(*[await producer.send(b"x") for _ in range(10)])
