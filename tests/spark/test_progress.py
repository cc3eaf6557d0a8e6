"""The progress line, and the summary."""

import io

import pytest

from seqdedupe.message_id import MessageId, Position
from seqdedupe_spark.range_task import TaskReport
from seqdedupe_spark.reader_job import Progress, summary, text
from seqdedupe_spark.rounds import Round, TopicStanding
from seqdedupe_spark.stores.contract import Stored

MIDDLE, END = (Position(1, MessageId(1, index), index) for index in (39, 99))


def a_round(written: int) -> Round:
    done = Round(standings={"t": TopicStanding(Stored(MIDDLE, 2), END)})
    done.count(TaskReport(read=written + 1, written=written, duplicates=1, dead_letters=2))
    return done


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_has_one_line_that_is_rewritten() -> None:
    stream = Terminal()
    progress = Progress(stream)
    for written in (1_000, 7):
        progress.show(a_round(written))
    progress.close()
    first, second, *rest = stream.getvalue().lstrip("\r").split("\r")
    assert first.startswith("1,000 rows, ")
    assert first.endswith("lag 60")
    assert second.startswith("1,007 rows, ")
    assert rest == []
    assert stream.getvalue().count("\n") == 1


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for _ in range(10):
        progress.show(a_round(5))
    progress.close()
    assert len(stream.getvalue().splitlines()) == 1
    monkeypatch.setattr("seqdedupe_spark.reader_job.LINE_SECONDS", 0)
    progress.show(a_round(5))
    assert stream.getvalue().splitlines()[1].startswith("55 rows, ")


def test_the_summary() -> None:
    assert summary(a_round(10), 1.23456) == {
        "read": 11,
        "written": 10,
        "duplicates": 1,
        "dead_letters": 2,
        "lag": 60,
        "seconds": 1.235,
        "topics": {"t": {"position": "1/1:39@39", "epoch": 2, "lag": 60}},
    }
    said = "11 messages read, 1 duplicate dropped, 2 dead letters, 10 rows written in 2.0 s; 60 left to read in 1 topic"
    assert text(a_round(10), 2) == said


def test_of_a_run_that_has_not_looked_nothing_is_said_to_be_known() -> None:
    unknown = Round(has_looked=False)
    assert summary(unknown, 1)["lag"] is None
    assert text(unknown, 1).startswith("nothing was read in 1.0 s")
