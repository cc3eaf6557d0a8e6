"""Pulsar's answers as data, and where this project's differ: the tables of docs/reference/pulsar-differences.md."""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seqdedupe.client import Verdict

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "reference" / "pulsar-differences.md"

UPSTREAM: dict[str, dict[str, Any]] = {
    case["name"]: case for case in json.loads((FOLDER / "pulsar-upstream.json").read_text())["cases"]
}
"""What Apache Pulsar's own tests of its deduplication assert."""

DIFFERENTIAL: dict[str, dict[str, Any]] = {
    case["name"]: case for case in json.loads((FOLDER / "pulsar-differential.json").read_text())["scenarios"]
}
"""What a real broker answered."""


@dataclass(frozen=True)
class Difference:
    """A step (from 1; 0: the log at the end) of a case, what Pulsar answers and what this project does."""

    case: str
    step: int
    pulsar: str
    here: str

    def __str__(self) -> str:
        return f"| `{self.case}` | {self.step or 'log'} | {self.pulsar} | {self.here} |"


def table(heading: str) -> list[list[str]]:
    """The cells of the rows below a heading of the page; the last column must say something."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert len(rows) > 2, f"there is no table below {heading!r}"
    assert all(row[-1] for row in rows[2:]), "a row without its last cell"
    return rows[2:]


def differences(heading: str) -> set[Difference]:
    """The differences that the page lists there. A row may be for several steps."""
    found = set()
    for case, steps, pulsar, here in table(heading):
        for step in steps.split(","):
            row = Difference(case.strip("`"), 0 if step.strip() == "log" else int(step), pulsar, here)
            assert row not in found, f"{row} stands there twice"
            found.add(row)
    return found


def names(heading: str) -> set[str]:
    """The names in the first column of a table."""
    return {name for row in table(heading) for name in re.findall(r"`([\w.]+)`", row[0])}


OWN_LOG = "A broker's own log"
SIDECARS_LOG = "The sidecar's log"
CANNOT_BE_SAID = "cannot be said"
NOT_SAID = {
    "opaque_range": (2, 5, 6),
    "restart_batch_and_range": (5,),
    "chunks_resent": (2, 3, 4, 5, 6, 7),
    "chunks_broken_off_restart": (2, 5, 6, 7),
}
"""The steps that PublishService cannot express. The page says this in a sentence, and does not list them."""
WORDS = {Verdict.NOT_DUP: "stored", Verdict.DUP: "dup", Verdict.UNKNOWN: "unknown"}


def observed(step: dict[str, Any]) -> str:
    """What Pulsar's broker answered to a step, in words; empty if the step has no answer."""
    answer = step.get("observed", {})
    if step["op"] == "open":
        return f"last ID {answer['last_sequence_id']}"
    if step["op"] == "pipeline":
        return ", ".join(one["verdict"] for one in answer["answers_in_order"])
    return str(answer.get("verdict", ""))


def in_words(log: list[tuple[str, list[int]]]) -> str:
    return " ".join(f"{name}:{'+'.join(map(str, ids))}" for name, ids in log)


def ids_of(publish: dict[str, Any]) -> list[int]:
    ids: list[int] = publish.get("message_ids", [publish["sequence_id"]])
    return ids


def compare(name: str, answers: list[str], log: str) -> Iterator[Difference]:
    """The differences between Pulsar's answers and these."""
    case = DIFFERENTIAL[name]
    for number, (step, here) in enumerate(zip(case["steps"], answers, strict=True), 1):
        if observed(step) != here:
            yield Difference(name, number, observed(step), here)
    pulsars = in_words([(entry["producer"], entry["ids"]) for entry in case["log"]])
    if pulsars != log:
        yield Difference(name, 0, pulsars, log)


def listed(heading: str, name: str) -> set[Difference]:
    """The differences of a case below a heading, and in the sidecar's log the steps that cannot be said."""
    steps = NOT_SAID.get(name, ()) if heading == SIDECARS_LOG else ()
    not_said = {
        Difference(name, step, observed(DIFFERENTIAL[name]["steps"][step - 1]), CANNOT_BE_SAID) for step in steps
    }
    return {row for row in differences(heading) if row.case == name} | not_said


def hold_against_the_page(rows: set[Difference], found: list[Difference]) -> None:
    missing = set(found) - rows
    gone = rows - set(found)
    assert not missing, "not on the page:\n" + "\n".join(map(str, sorted(missing, key=lambda d: d.step)))
    assert not gone, "on the page, and not so:\n" + "\n".join(map(str, sorted(gone, key=lambda d: d.step)))


def is_said(publish: dict[str, Any]) -> bool:
    """Whether it is a message or a batch: there are no ranges that nobody looks into, and no chunks."""
    highest = max(publish.get("highest_sequence_id", 0), publish["sequence_id"])
    return "chunk" not in publish and (highest == publish["sequence_id"] or "message_ids" in publish)


def in_runs(ids: Sequence[int], judged: Sequence[int]) -> str:
    """One word if all rows have the same verdict, else each verdict with its IDs."""
    by_word: dict[str, list[int]] = {}
    for sequence_id, verdict in zip(ids, judged, strict=True):
        by_word.setdefault(WORDS[Verdict(verdict)], []).append(sequence_id)
    if len(by_word) == 1:
        return next(iter(by_word))
    return "; ".join(f"{word} {'+'.join(map(str, some))}" for word, some in by_word.items())
