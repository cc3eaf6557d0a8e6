"""Counts in texts: one thing is no plural, in the helper and in the sources that make texts for people."""

import re
from pathlib import Path

import pytest

from seqdedupe.figures import counted

ROOT = Path(__file__).parents[1]

PLURALS = "messages|topics|producers|records|rows|partitions|batches|frames|places|duplicates|cursors|streams|outputs"

BY_HAND = re.compile(rf"\{{(?![^{{}}]*(?i:max_))[^{{}}]*(?::,|len\([^{{}}]*\))\}} (?:{PLURALS})\b")
"""A count, but for limits, and a plural in an f-string."""


def test_a_count_has_its_noun() -> None:
    assert [counted(n, "topic") for n in (0, 1, 1024)] == ["0 topics", "1 topic", "1,024 topics"]
    assert [counted(n, "batch has", "batches have") for n in (1, 2)] == ["1 batch has", "2 batches have"]


@pytest.mark.parametrize("folder", ["seqdedupe/cli", "seqdedupe/services", "spark/seqdedupe_spark", "broker_sidecar"])
def test_no_text_for_people_joins_a_count_and_a_plural_by_hand(folder: str) -> None:
    found = [
        f"{path.name}: {one[0]}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for one in BY_HAND.finditer(path.read_text())
    ]
    assert found == []
