"""The benchmarks with a Pulsar broker run, with few messages."""

import importlib
from pathlib import Path
from typing import Any

import pytest

from bench import pulsar_door, pulsar_native, pulsar_publish, pulsar_recovery, pulsar_sidecars
from bench.__main__ import measure
from tests.tiers import GO

SMALL: dict[Any, dict[str, int]] = {
    pulsar_door: {"JAVA_MESSAGES": 1000, "GO_MESSAGES": 1000, "PYTHON_MESSAGES": 1000, "ONE_BY_ONE": 10},
    pulsar_native: {"BATCHES": 10, "PRODUCERS": 10, "TURNS": 3, "PERF_MESSAGES": 1000},
    pulsar_publish: {"MESSAGES": 1000},
    pulsar_recovery: {"TAIL": 2000},
    pulsar_sidecars: {"TOPICS": 30},
}


@pytest.mark.parametrize("name", ["pulsar_door", "pulsar_native", "pulsar_recovery", "pulsar_takeover"])
def test_a_figure_has_all_its_ratios(
    name: str, pulsar_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "pulsar_door":
        GO.check()
    for module, sizes in SMALL.items():
        for size, value in sizes.items():
            monkeypatch.setattr(module, size, value)
    monkeypatch.setenv("PULSAR_HOME", str(pulsar_home))
    with importlib.import_module(f"bench.{name}").figure(tmp_path) as figure:
        measured = measure(figure, 1)
        values = {ratio.name: ratio.value({arm: value for arm, [value] in measured.items()}) for ratio in figure.ratios}
    assert all(value > 0 for value in values.values()), values
