"""What is sent, in which frames, and when it is settled."""

import asyncio
import random
from collections import Counter
from itertools import count

import numpy as np
import pytest

from seqdedupe.client.pending import Verdict
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import DataLossError
from seqdedupe.functions import backlog as backlogs
from seqdedupe.functions.backlog import FULL_FRAME_BYTES, Backlog, OutputFrame, Row
from seqdedupe.functions.identity import FunctionOutput
from seqdedupe.functions.pipeline import OutputPublisher
from tests.client.fake_sidecar import fake_sidecar
from tests.client.helpers import until

ALL_NEW = np.zeros(0, np.uint8)

_epochs = count(1)


def row(sequence_id: int, told: list[int], name: str = "p", size: int = 1) -> Row:
    return Row(name, sequence_id, FunctionOutput("t", bytes(size), None, 0, {}), lambda: told.append(sequence_id))


def open_all(backlog: Backlog, persisted: int = -1) -> None:
    for name in backlog.unopened():
        backlog.opened(name, next(_epochs), persisted)


def sent(backlog: Backlog) -> OutputFrame:
    frame = backlog.next_frame()
    assert frame is not None
    return frame


def test_nothing_is_sent_before_its_name_is_opened() -> None:
    backlog, told = Backlog(), list[int]()
    backlog.add([row(5, told)])
    assert backlog.next_frame() is None
    assert backlog.unopened() == ["p"]
    open_all(backlog, persisted=3)
    frame = sent(backlog)
    assert frame.batch.sequence_ids.tolist() == [5]
    assert frame.batch.previous_sequence_ids.tolist() == [3]
    assert backlog.receipt(frame.number, ALL_NEW)
    assert told == [5]


def test_what_is_persisted_when_a_name_is_opened_is_settled_and_not_sent() -> None:
    backlog, told = Backlog(), list[int]()
    for i in range(4):
        backlog.add([row(i, told)])
    open_all(backlog, persisted=2)
    assert told == [0, 1, 2]
    assert sent(backlog).batch.sequence_ids.tolist() == [3]


def test_links_lead_from_frame_to_frame_for_each_name() -> None:
    backlog, told = Backlog(), list[int]()
    backlog.add([row(1, told, "a"), row(1, told, "b")])
    open_all(backlog)
    first = sent(backlog)
    backlog.add([row(2, told, "a")])
    backlog.add([row(3, told, "a"), row(3, told, "b")])
    second = sent(backlog)
    assert first.batch.names() == ["a", "b"]
    assert first.batch.previous_sequence_ids.tolist() == [-1, -1]
    assert second.batch.names() == ["a", "b"]
    assert second.batch.previous_sequence_ids.tolist() == [1, 1]
    assert second.batch.producer_indexes.tolist() == [0, 0, 1]


def test_frames_settle_in_their_order() -> None:
    backlog, told = Backlog(), list[int]()
    backlog.add([row(1, told)])
    open_all(backlog)
    first = sent(backlog)
    backlog.add([row(2, told)])
    second = sent(backlog)
    assert backlog.receipt(second.number, ALL_NEW)
    assert told == []
    assert backlog.receipt(first.number, ALL_NEW)
    assert told == [1, 2]
    assert not backlog.has_work


def test_an_unknown_row_settles_nothing_of_its_frame_nor_after_it() -> None:
    backlog, told = Backlog(), list[int]()
    backlog.add([row(1, told)])
    backlog.add([row(2, told)])
    open_all(backlog)
    frame = sent(backlog)
    assert not backlog.receipt(frame.number, np.array([Verdict.DUP, Verdict.UNKNOWN], np.uint8))
    assert told == []
    backlog.rewind()
    backlog.opened("p", next(_epochs), 1)
    assert told == [1]
    assert sent(backlog).batch.sequence_ids.tolist() == [2]


def test_outputs_of_an_input_are_never_parted() -> None:
    backlog, told = Backlog(), list[int]()
    size = FULL_FRAME_BYTES * 2 // 5
    for i in range(3):
        backlog.add([row(i, told, "a", size), row(i, told, "b", size)])
    open_all(backlog)
    frames = [sent(backlog) for _ in range(3)]
    assert [len(frame.batch) for frame in frames] == [2, 2, 2]
    backlog.rewind()
    for name in "ab":
        backlog.opened(name, next(_epochs), -1)
    assert [len(sent(backlog).batch) for _ in range(3)] == [2, 2, 2]


def test_a_copy_settles_with_the_one_that_is_under_way() -> None:
    backlog, told = Backlog(), list[int]()
    backlog.add([row(1, told)])
    open_all(backlog)
    frame = sent(backlog)
    backlog.add([row(1, told)])
    assert backlog.next_frame() is None
    backlog.receipt(frame.number, ALL_NEW)
    assert told == [1, 1]
    backlog.add([row(1, told)])
    assert told == [1, 1, 1]


def test_a_name_whose_settled_outputs_are_gone_is_data_loss() -> None:
    backlog, told = Backlog(), list[int]()
    backlog.add([row(1, told)])
    open_all(backlog)
    frame = sent(backlog)
    backlog.receipt(frame.number, ALL_NEW)
    backlog.add([row(2, told)])
    backlog.rewind()
    with pytest.raises(DataLossError):
        backlog.opened("p", next(_epochs), 0)


def test_a_name_that_was_forgotten_begins_anew() -> None:
    backlog, told = Backlog(), list[int]()
    backlog.add([row(1, told)])
    open_all(backlog)
    backlog.receipt(sent(backlog).number, ALL_NEW)
    backlog.add([row(2, told)])
    backlog.rewind()
    backlog.opened("p", next(_epochs), -1, is_forgotten=True)
    frame = sent(backlog)
    assert frame.batch.sequence_ids.tolist() == [2]
    assert frame.batch.previous_sequence_ids.tolist() == [-1]


def test_names_with_nothing_under_way_are_let_go_of_with_the_stream() -> None:
    backlog, told = Backlog(), list[int]()
    backlog.add([row(1, told, "old")])
    open_all(backlog)
    backlog.receipt(sent(backlog).number, ALL_NEW)
    backlog.add([row(1, told, "new")])
    backlog.rewind()
    assert list(backlog.sessions()) == ["old"]
    backlog.forget_idle()
    assert backlog.sessions() == {}
    assert backlog.unopened() == ["new"]


def test_what_a_session_has_settled_is_not_looked_for_once_its_name_is_let_go_of() -> None:
    backlog, told = Backlog(), list[int]()
    backlog.add([row(1, told, "a")])
    backlog.add([row(2, told, "b")])
    backlog.opened("a", next(_epochs), 1)
    assert told == [1]
    backlog.rewind()
    backlog.forget_idle()
    assert backlog.unopened() == ["b"]
    open_all(backlog)
    assert sent(backlog).batch.sequence_ids.tolist() == [2]


def test_a_name_with_nothing_under_way_is_asked_for_all_the_same_before_it_is_let_go_of() -> None:
    """Else a sidecar that was restored to an older state while the function was idle would not be found out."""
    backlog, told = Backlog(), list[int]()
    backlog.add([row(7, told)])
    open_all(backlog)
    backlog.receipt(sent(backlog).number, ALL_NEW)
    backlog.add([row(8, told, "new")])
    backlog.rewind()
    (name,) = backlog.sessions()
    with pytest.raises(DataLossError):
        backlog.opened(name, next(_epochs), 5)


def test_a_name_that_somebody_else_has_taken_is_needed_again_while_something_is_under_way() -> None:
    backlog, told = Backlog(), list[int]()
    backlog.add([row(1, told, "idle"), row(1, told, "busy")])
    open_all(backlog)
    backlog.receipt(sent(backlog).number, ALL_NEW)
    backlog.add([row(2, told, "busy")])
    backlog.rewind()
    assert not backlog.lost("idle")
    assert backlog.lost("busy")
    backlog.forget_idle()
    assert backlog.unopened() == ["busy"]


def test_names_of_old_ledgers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backlogs, "MANY_NAMES", 10)
    backlog, told = Backlog(), list[int]()
    backlog.add([row(0, told, "busy")])
    for ledger in range(100):
        backlog.add([row(ledger, told, f"{ledger}/{k}") for k in range(3)])
        open_all(backlog)
        while (frame := backlog.next_frame()) is not None:
            backlog.receipt(frame.number, ALL_NEW)
        backlog.add([row(ledger + 1, told, "busy")])  # not sent yet
    assert len(backlog.sessions()) < 20
    assert sent(backlog).batch.names() == ["busy"]
    # One that comes again under a name that was forgotten is opened again, and found to be settled.
    told.clear()
    backlog.add([row(0, told, "0/0")])
    assert backlog.unopened() == ["0/0"]
    open_all(backlog, persisted=0)
    assert told == [0]


def test_a_question_is_answered_once_its_name_is_opened() -> None:
    backlog, answers = Backlog(), list[int]()
    backlog.ask("p", answers.append)
    assert backlog.has_work
    assert backlog.unopened() == ["p"]
    open_all(backlog, persisted=8)
    backlog.ask("p", answers.append)
    assert answers == [8, 8]
    assert not backlog.has_work


@pytest.mark.parametrize("seed", range(30))
def test_whatever_happens_on_the_way_each_output_is_stored_once_and_settled_when_it_is(seed: int) -> None:
    chance = random.Random(seed)
    backlog = Backlog()
    log: list[tuple[str, int]] = []
    settled: Counter[tuple[str, int]] = Counter()
    on_the_way: list[OutputFrame] = []
    added = 0

    def highest(name: str) -> int:
        return max((sequence_id for of, sequence_id in log if of == name), default=-1)

    def add() -> None:
        nonlocal added
        rows = []
        for k in range(chance.randint(1, 3)):
            name = f"{added // 40}/{k}"
            key = (name, added)

            def told(key: tuple[str, int] = key) -> None:
                assert key in log
                settled[key] += 1

            rows.append(Row(name, added, FunctionOutput("t", b"x", None, 0, {}), told))
        backlog.add(rows)
        added += 1

    def store(frame: OutputFrame) -> list[int]:
        """What the sidecar does: nothing whose predecessor is missing."""
        links = dict(zip(frame.batch.names(), frame.batch.previous_sequence_ids.tolist(), strict=True))
        assert all(highest(name) >= link for name, link in links.items())
        rows = [one for group in frame.groups for one in group]
        verdicts: list[int] = [Verdict.DUP if one.sequence_id <= highest(one.name) else Verdict.NOT_DUP for one in rows]
        log.extend(
            (one.name, one.sequence_id)
            for one, verdict in zip(rows, verdicts, strict=True)
            if verdict == Verdict.NOT_DUP
        )
        return verdicts

    while added < 200 or backlog.has_work:
        step = chance.random()
        if step < 0.4 and added < 200:
            add()
        elif step < 0.6:
            for name in backlog.unopened():
                backlog.opened(name, next(_epochs), highest(name))
            if (frame := backlog.next_frame()) is not None:
                on_the_way.append(frame)
        elif step < 0.9 and on_the_way:
            frame = on_the_way.pop(0)
            verdicts = store(frame)
            if chance.random() < 0.8:
                backlog.receipt(frame.number, np.array(verdicts, np.uint8))
            else:
                # The answer is lost with the stream, and maybe frames after it.
                for other in on_the_way[: chance.randint(0, len(on_the_way))]:
                    store(other)
                on_the_way.clear()
                backlog.rewind()
                for name in backlog.sessions():
                    backlog.opened(name, next(_epochs), highest(name))
                backlog.forget_idle()
    assert len(log) == len(set(log)) == len(settled)
    assert set(settled.values()) == {1}
    for name in {name for name, _ in log}:
        ids = [sequence_id for of, sequence_id in log if of == name]
        assert ids == sorted(ids)


def test_a_name_begins_when_what_was_sent_before_is_settled() -> None:
    """Else an input of a new ledger could be taken, and one before it be refused: no link leads from name to name."""
    backlog, told = Backlog(), list[int]()
    backlog.add([row(1, told, "ledger/7/0")])
    backlog.add([row(2, told, "ledger/7/0")])
    backlog.add([row(3, told, "ledger/8/0"), row(3, told, "ledger/8/1")])
    backlog.add([row(4, told, "ledger/8/0")])
    open_all(backlog)
    first = sent(backlog)
    assert first.batch.sequence_ids.tolist() == [1, 2]
    backlog.add([row(5, told, "ledger/8/0")])
    assert backlog.next_frame() is None
    assert backlog.receipt(first.number, ALL_NEW)
    second = sent(backlog)
    assert second.batch.sequence_ids.tolist() == [3, 3, 4, 5]
    backlog.add([row(6, told, "ledger/8/1")])
    assert sent(backlog).batch.previous_sequence_ids.tolist() == [3]


@pytest.mark.parametrize(("durable_index", "is_loss"), [(5, True), (7, False), (None, False)])
async def test_a_topic_that_is_shorter_than_before_is_data_loss(durable_index: int | None, is_loss: bool) -> None:
    """An older copy of the topic that never knew the name says that it has forgotten the name."""
    told: list[int] = []
    async with fake_sidecar() as fake:
        fake.on_open = lambda request: fake.opened(
            **({"forgotten": [0], "durable_index": durable_index} if request.epochs else {"durable_index": 4})
        )
        fake.on_frame = lambda frame: [
            fake.answer(receipts=[{"frame": frame.number, "first_index": 6}], durable_index=7)
        ]
        publisher = OutputPublisher(Sidecars.parse(fake.address), "t", asyncio.Event())
        running = asyncio.create_task(publisher.run())
        publisher.add([row(0, told)])
        await until(lambda: told == [0] or running.done())
        fake.ends_streams = 1
        publisher.add([row(1, told)])
        await until(lambda: told == [0, 1] or running.done())
        running.cancel()
        with pytest.raises(DataLossError if is_loss else asyncio.CancelledError):
            await running
    assert told == ([0] if is_loss else [0, 1])
