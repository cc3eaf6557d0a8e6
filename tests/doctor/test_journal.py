"""Data directories whose logs lack what their journal holds: the doctor sees it, and a salvage has it."""

import asyncio
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from seqdedupe.doctor import salvage as salvaging
from seqdedupe.doctor.examine import examine
from seqdedupe.doctor.salvage import salvage
from tests.doctor.directories import Message, fingerprint, opened
from tests.log.rounds import gate_of_rounds, put
from tests.log.test_journal import files_in

TOPICS = [f"persistent://public/default/{name}" for name in "ab"]


class AfterAPowerCut(NamedTuple):
    """The last message of each topic stands in the journal alone."""

    directory: Path
    held: list[list[Message]]


@pytest.fixture
async def cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AfterAPowerCut:
    gate = gate_of_rounds(monkeypatch)
    async with opened(tmp_path / "data") as data:
        for topic in TOPICS:
            await data.publish(topic, [("p", 0)], [b"first"])
        sizes = {path: path.stat().st_size for path in (tmp_path / "data").rglob("*.log")}
        gate.clear()
        publishing = [asyncio.ensure_future(data.publish(topic, [("p", 1)], [b"second"])) for topic in TOPICS]
        for _ in range(10):
            await asyncio.sleep(0)
        gate.set()
        await asyncio.gather(*publishing)
        held = [await data.messages(topic) for topic in TOPICS]
        directory = put(files_in(tmp_path / "data"), tmp_path / "cut")
    for path, size in sizes.items():
        os.truncate(directory / path.relative_to(tmp_path / "data"), size)
    assert [[message.payload for message in messages] for messages in held] == [[b"first", b"second"]] * 2
    return AfterAPowerCut(directory, held)


def test_the_doctor_reads_logs_with_their_journal(cut: AfterAPowerCut) -> None:
    before = fingerprint(cut.directory)
    found = examine(cut.directory)
    assert fingerprint(cut.directory) == before
    assert found.is_whole
    assert [topic.messages for topic in found.topics] == [2, 2]


async def salvaged(cut: AfterAPowerCut, to: Path) -> list[list[Message]]:
    made = await asyncio.to_thread(salvage, cut.directory, to)
    assert [topic.is_copied for topic in made.topics] == [True, True]
    async with opened(to) as data:
        return [await data.messages(topic) for topic in TOPICS]


async def test_a_topic_that_is_copied_has_what_its_journal_held(cut: AfterAPowerCut, tmp_path: Path) -> None:
    assert await salvaged(cut, tmp_path / "new") == cut.held


async def test_control_a_copy_of_the_files_alone(
    cut: AfterAPowerCut, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(salvaging, "put_back", lambda *arguments: True)
    assert await salvaged(cut, tmp_path / "new") == [messages[:1] for messages in cut.held]


async def test_a_journal_that_is_missing_or_damaged_is_said_and_what_to_do(cut: AfterAPowerCut, tmp_path: Path) -> None:
    """A salvage has what stands in the files."""
    secret = cut.directory / "logs" / "journal" / "secret"
    secret.unlink()
    found = examine(cut.directory)
    assert not found.is_whole
    assert str(secret) in found.journal_why
    assert found.to_json()["journal_why"] == found.journal_why
    assert any("--give-up-journal" in cure for cure in found.cures)
    assert await salvaged(cut, tmp_path / "new") == [messages[:1] for messages in cut.held]


def test_a_log_that_ends_before_its_part_is_damaged(cut: AfterAPowerCut) -> None:
    first, _ = sorted((cut.directory / "logs").glob("*/*.log"))
    os.truncate(first, first.stat().st_size - 10)
    found = examine(cut.directory)
    assert [topic.is_whole for topic in found.topics] == [False, True]
    assert "was synced up to" in found.topics[0].damage[0].what
