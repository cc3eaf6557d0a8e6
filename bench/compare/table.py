"""The table, in Markdown, and the same as JSON."""

import os
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.compare.broker import Mode
from bench.compare.column import Column, Sizes

NONE = "–"


def machine() -> dict[str, Any]:
    """What it was measured on."""
    models = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    memory = next((int(line.split()[1]) for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), 0)
    return {
        "processor": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**20),
        "system": f"Linux {platform.release()}",
        "python": platform.python_version(),
        "load_average": round(os.getloadavg()[0], 2),
        "date": datetime.now(UTC).date().isoformat(),
    }


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _number(value: float) -> str:
    if value >= 1_000_000:
        return f"{value / 1_000_000:.2f} M"
    if value >= 1_000:
        return f"{value / 1_000:.0f}k" if value >= 10_000 else f"{value / 1_000:.1f}k"
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def _figure(column: Column, name: str, missing: str = NONE) -> str:
    """The median, and of more than one the least and the most."""
    values = column.figures.get(name)
    if not values:
        return missing
    spread = f" ({_number(min(values))}–{_number(max(values))})" if len(values) > 1 else ""
    return _number(statistics.median(values)) + spread


def _kept(column: Column) -> str:
    if column.killed is None:
        return NONE
    return f"{column.killed['lost']} lost, {column.killed['doubled']} doubled of {column.killed['messages']:,}"


def _mark(column: Column) -> str:
    """Where a figure is not durable because the broker has no such mode."""
    return "" if Mode.SYNCED in column.broker.modes else f" ({Mode.PAGE_CACHE})"


def _rows(columns: list[Column], sizes: Sizes) -> list[list[str]]:
    def row(name: str, *cells: str) -> list[str]:
        return [name, *cells]

    def lacks(column: Column, mode: Mode) -> str:
        return (
            NONE
            if column.not_available or mode in column.broker.modes
            else column.broker.modes[next(iter(column.broker.modes))]
        )

    latencies = [
        f"{_figure(c, 'p50 ms')} / {_figure(c, 'p99 ms')}{_mark(c)}" if "p50 ms" in c.figures else NONE for c in columns
    ]
    kept = f"after {sizes.kills} kill -9 of the broker under load"
    rows = [
        row(
            "messages/s, durable when confirmed",
            *(_figure(c, f"published/s, {Mode.SYNCED}", lacks(c, Mode.SYNCED)) for c in columns),
        ),
        row(
            "messages/s, in the page cache when confirmed",
            *(_figure(c, f"published/s, {Mode.PAGE_CACHE}", lacks(c, Mode.PAGE_CACHE)) for c in columns),
        ),
        row("one message in flight, p50 / p99 ms", *latencies),
        row("messages/s read back", *(_figure(c, "read/s") for c in columns)),
        row(kept, *(_kept(c) for c in columns)),
        row("client", *(c.broker.client for c in columns)),
        row("durable by", *(c.broker.modes.get(Mode.SYNCED, NONE) for c in columns)),
        row("page cache by", *(c.broker.modes.get(Mode.PAGE_CACHE, NONE) for c in columns)),
        row("deduplication", *(c.broker.deduplication for c in columns)),
    ]
    for number, column in enumerate(columns, start=1):
        if column.not_available is not None:
            rows[0][number] = f"not available: {' '.join(column.not_available.split()).replace('|', '/')}"
    return rows


def markdown(columns: list[Column], sizes: Sizes, on: dict[str, Any]) -> str:
    """The table, and below it what it was measured on and what failed."""
    rows = [["", *(f"{c.broker.name} {c.broker.version}" for c in columns)], ["---"] * (len(columns) + 1)]
    lines = ["| " + " | ".join(row) + " |" for row in rows + _rows(columns, sizes)]
    lines += [
        "",
        f"One Python producer, messages of 100 bytes, {sizes.rounds} interleaved rounds of {sizes.seconds:g} s after "
        "one that does not count; medians (least–most).",
        f"{on['processor']}, {on['cores']} cores, {on['memory_gib']} GiB, {on['system']}, Python {on['python']}, "
        f"load average at the start {on['load_average']}, {on['date']}.",
    ]
    lines += [f"{c.broker.name} failed: {why}" for c in columns for why in c.problems]
    return "\n".join(lines)


def as_json(columns: list[Column], sizes: Sizes, on: dict[str, Any]) -> dict[str, Any]:
    """The same, with every round's value."""
    return {
        "machine": on,
        "rounds": sizes.rounds,
        "seconds": sizes.seconds,
        "kills": sizes.kills,
        "brokers": [
            {
                "name": c.broker.name,
                "version": c.broker.version,
                "client": c.broker.client,
                "modes": dict(c.broker.modes),
                "deduplication": c.broker.deduplication,
                "not_available": c.not_available,
                "problems": c.problems,
                "figures": c.figures,
                "killed": c.killed,
            }
            for c in columns
        ],
    }
