"""Damage of every kind at random places: what is gone is named, what is left is salvaged, nothing is papered over."""

import asyncio
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from seqdedupe.doctor.examine import examine
from seqdedupe.doctor.findings import TopicFindings
from seqdedupe.doctor.salvage import REPORT_FILE, salvage
from tests.doctor.directories import Message, fingerprint, opened, segments

TOPIC = "persistent://public/default/t"
OTHER = "persistent://public/default/other"
NAMES = ("a", "b", "c", "d")
BATCHES = 60
PAGE = 4096
SECTOR = 512
CASES = 5

Damage = Callable[[random.Random, Path], None]


async def fill(directory: Path, seed: int) -> list[Message]:
    """Two topics in several segments and terms, with snapshots here and there; what TOPIC acknowledged, in order."""
    chance = random.Random(seed)
    acknowledged: list[Message] = []
    last = dict.fromkeys(NAMES, -1)
    for start in range(3):
        async with opened(directory) as data:
            for k in range(BATCHES // 3):
                data.clock_ms += chance.randrange(3)
                names = chance.sample(NAMES, chance.randint(1, 3))
                rows = []
                for name in names:
                    for _ in range(chance.randint(1, 4)):
                        last[name] += chance.choice((1, 1, 5))
                        rows.append((name, last[name]))
                payloads = [_payload(chance, directory) for _ in rows]
                await data.publish(TOPIC, rows, payloads)
                acknowledged += (Message(*row, payload) for row, payload in zip(rows, payloads, strict=True))
                if k % 7 == 0:
                    await data.publish(OTHER, [("z", BATCHES * start + k)], [b"other"])
                if chance.random() < 0.05:
                    await data.topics.get(TOPIC).keeper.snapshot()
    return acknowledged


def _payload(chance: random.Random, directory: Path) -> bytes:
    """Mostly noise; sometimes what stands in the log itself, which poses as records of it."""
    if chance.random() < 0.15 and (directory / "logs").is_dir() and (files := segments(directory)):
        raw = chance.choice(files).read_bytes()
        at = chance.randrange(len(raw) + 1)
        return raw[at : at + 400]
    return chance.randbytes(chance.randrange(120))


def flip(chance: random.Random, file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    file.write_bytes(raw)


def zero(size: int) -> Damage:
    def damage(chance: random.Random, file: Path) -> None:
        raw = bytearray(file.read_bytes())
        at = chance.randrange(len(raw)) // size * size
        raw[at : at + size] = bytes(len(raw[at : at + size]))
        file.write_bytes(raw)

    return damage


def cut(chance: random.Random, file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[: chance.randrange(len(raw))])


def remove(chance: random.Random, file: Path) -> None:
    file.unlink()


def swap(chance: random.Random, file: Path) -> None:
    """A page of the file stands at the place of another one, as after a write that went astray."""
    raw = bytearray(file.read_bytes())
    one, other = (chance.randrange(len(raw)) // SECTOR * SECTOR for _ in range(2))
    raw[one : one + SECTOR] = raw[other : other + SECTOR].ljust(len(raw[one : one + SECTOR]), b"\0")
    file.write_bytes(raw)


KINDS: dict[str, Damage] = {
    "flip": flip,
    "sector": zero(SECTOR),
    "page": zero(PAGE),
    "cut": cut,
    "remove": remove,
    "swap": swap,
}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_missing_is_named_and_the_rest_is_salvaged(kind: str, tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    whole = tmp_path / "whole"
    acknowledged = await fill(whole, seed)
    files = len(segments(whole))
    assert files > 3
    for case in range(CASES):
        directory = tmp_path / f"case-{case}"
        shutil.copytree(whole, directory)
        for _ in range(chance.choice((1, 1, 1, 3))):
            # The one before the last as well as any: what is cut off the last one may look like a power cut.
            left = segments(directory)
            if len(left) > 1:
                KINDS[kind](chance, chance.choice(left))
        await _check(directory, tmp_path / f"new-{case}", acknowledged)
        shutil.rmtree(directory)


async def _check(directory: Path, new: Path, acknowledged: list[Message]) -> None:
    before = fingerprint(directory)
    found = (await asyncio.to_thread(salvage, directory, new)).findings
    assert examine(directory).to_json() == found.to_json()
    assert fingerprint(directory) == before
    assert (new / REPORT_FILE).exists()
    topic, other = found.topics
    assert other.is_whole
    async with opened(new) as data:
        left = await data.messages(TOPIC) if topic.messages or topic.next_index else []
        assert len(await data.messages(OTHER)) == other.messages == len(range(0, BATCHES // 3, 7)) * 3
        persisted = {name: await data.persisted(TOPIC, name) for name in NAMES}
        gone = _gone(acknowledged, left)
        for index, message in gone:
            _is_reported(topic, index, message, persisted[message.producer])
        for message in left:
            assert message.sequence_id <= persisted[message.producer]
        # It goes on from there.
        for name in NAMES:
            await data.publish(TOPIC, [(name, persisted[name] + 1)], [b"new"])
    if gone:
        assert not topic.is_whole or topic.torn_end is not None or _ends_earlier(topic, acknowledged)
    assert examine(new).is_whole


def _ends_earlier(topic: TopicFindings, acknowledged: list[Message]) -> bool:
    """A log whose end was cut off between two records, or whose last file is gone, after the last snapshot, or whose
    first files are: what is left of it is what another log may be."""
    return topic.next_index < len(acknowledged) or topic.first_index > 0


def _gone(acknowledged: list[Message], left: list[Message]) -> list[tuple[int, Message]]:
    """What is not left, by index. What is left is in order, and each was acknowledged, as it was."""
    gone = []
    at = 0
    for index, message in enumerate(acknowledged):
        if at < len(left) and left[at] == message:
            at += 1
        else:
            gone.append((index, message))
    assert at == len(left), left[at]
    return gone


def _is_reported(topic: TopicFindings, index: int, message: Message, persisted: int) -> None:
    """A message that is gone is named by its index; and by its ID, unless sending it again would store it."""
    in_damage = any(
        damage.first_index <= index and (damage.next_index is None or index < damage.next_index)
        for damage in topic.damage
    )
    is_outside = index < topic.first_index or index >= topic.next_index
    is_torn = topic.torn_end is not None and index >= topic.next_index
    assert in_damage or is_outside or is_torn, (index, topic.to_json())
    if message.sequence_id <= persisted and index >= topic.first_index:
        assert any(
            missing.producer == message.producer
            and missing.first_sequence_id <= message.sequence_id <= missing.last_sequence_id
            for missing in topic.missing
        ), (index, message, topic.to_json())


async def test_in_a_directory_that_is_whole_nothing_is_found(tmp_path: Path) -> None:
    acknowledged = await fill(tmp_path / "data", 1)
    before = fingerprint(tmp_path / "data")
    found = examine(tmp_path / "data")
    assert fingerprint(tmp_path / "data") == before
    assert found.is_whole
    topic, other = found.topics
    assert (topic.name, other.name) == (TOPIC, OTHER)
    assert (topic.messages, topic.first_index, topic.next_index) == (len(acknowledged), 0, len(acknowledged))
    assert topic.producers == len(NAMES)
    assert topic.log_bytes == sum(path.stat().st_size for path in segments(tmp_path / "data"))
    assert not topic.damage
    assert not topic.missing
    assert not topic.cures
    assert not found.cures
