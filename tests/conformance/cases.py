"""Pulsar's answers as data, and the tables of docs/pulsar-differences.md that say where this project's differ."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "pulsar-differences.md"

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
    """The cells of the rows below a heading of the page; the last column says why, and must say something."""
    section = PAGE.read_text().partition(f"## {heading}\n")[2].partition("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    assert len(rows) > 2, f"there is no table below {heading!r}"
    assert all(len(row[-1]) > 10 for row in rows[2:]), "a row without a reason"
    return rows[2:]


def differences(heading: str) -> set[Difference]:
    """The differences that the page lists there. A row may be for several steps."""
    found = set()
    for case, steps, pulsar, here, _why in table(heading):
        for step in steps.split(","):
            row = Difference(case.strip("`"), 0 if step.strip() == "log" else int(step), pulsar, here)
            assert row not in found, f"{row} stands there twice"
            found.add(row)
    return found


def names(heading: str) -> set[str]:
    """The names in the first column of a table."""
    return {name for row in table(heading) for name in re.findall(r"`([\w.]+)`", row[0])}
