"""The table, in Markdown, with what must be reached; and all that was measured as JSON."""

import os
import platform
import statistics
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.compare.broker import Mode
from bench.compare.column import Column, Sizes
from bench.compare.goals import reached
from bench.compare.rounds import MESSAGES_PER_SECOND

NONE = "–"
KEEPS_UP = 0.95
"""A broker that takes less of what is sent has no latencies: they grow for as long as it goes on."""

LABELS = {Mode.SYNCED: "durable", Mode.PAGE_CACHE: "page cache"}
"""When it is confirmed."""


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


def _first(column: Column) -> Mode:
    return next(iter(column.broker.modes))


def _lacks(column: Column, mode: Mode) -> str:
    """What to say where there is no such mode."""
    return NONE if column.not_available or mode in column.broker.modes else column.broker.modes[_first(column)]


def _with_cpu(cell: str, column: Column, name: str) -> str:
    cpu = _figure(column, name)
    return cell if NONE in (cell, cpu) else f"{cell} · {cpu}"


def _rate(column: Column, figure: str, mode: Mode, missing: str = NONE) -> str:
    return _with_cpu(_figure(column, f"{figure}/s, {mode}", missing), column, f"{figure} CPU, {mode}")


def _percentiles(column: Column, figure: str, mode: Mode) -> str:
    p50, p99 = (_figure(column, f"{figure} {p}, {mode}") for p in ("p50", "p99"))
    return NONE if p50 == NONE else f"{p50} / {p99}"


def _steady(column: Column, mode: Mode) -> str:
    took = _percentiles(column, "steady", mode)
    rate = column.figures.get(f"steady/s, {mode}")
    if rate and statistics.median(rate) < KEEPS_UP * MESSAGES_PER_SECOND:
        took = f"only {_figure(column, f'steady/s, {mode}')} a second"
    return _with_cpu(took, column, f"steady CPU, {mode}")


def _rows_of(mode: Mode, columns: list[Column]) -> list[list[str]]:
    """What is measured in each mode."""
    cells = {
        "messages/s, one a call · CPU": [_rate(c, "published", mode, _lacks(c, mode)) for c in columns],
        "messages/s, in ready batches · CPU": [_rate(c, "ready", mode) for c in columns],
        "20,000 messages/s, one a call: p50 / p99 ms · CPU": [_steady(c, mode) for c in columns],
        "one message in flight, p50 / p99 ms": [_percentiles(c, "single", mode) for c in columns],
    }
    return [[f"{LABELS[mode]}: {name}", *row] for name, row in cells.items()]


def _rows(columns: list[Column], sizes: Sizes) -> list[list[str]]:
    def row(name: str, figure: str) -> list[str]:
        return [name, *(_figure(c, f"{figure}, {_first(c)}") for c in columns)]

    rows = [
        *_rows_of(Mode.SYNCED, columns),
        *_rows_of(Mode.PAGE_CACHE, columns),
        row("messages/s read back, one by one", "read/s"),
        row("server's memory, MB", "server MB"),
        row("client's memory, MB", "client MB"),
        [f"after {sizes.kills} kill -9 of the broker under load", *map(_kept, columns)],
        ["client", *(c.broker.client for c in columns)],
        ["durable by", *(c.broker.modes.get(Mode.SYNCED, NONE) for c in columns)],
        ["page cache by", *(c.broker.modes.get(Mode.PAGE_CACHE, NONE) for c in columns)],
        ["deduplication", *(c.broker.deduplication for c in columns)],
    ]
    for number, column in enumerate(columns, start=1):
        if column.not_available is not None:
            rows[0][number] = f"not available: {' '.join(column.not_available.split()).replace('|', '/')}"
    return [row for row in rows if any(cell != NONE for cell in row[1:])]


def markdown(columns: list[Column], sizes: Sizes, on: dict[str, Any]) -> str:
    """The table, and below it what it was measured on and what failed."""
    rows = [["", *(f"{c.broker.name} {c.broker.version}" for c in columns)], ["---"] * (len(columns) + 1)]
    lines = ["| " + " | ".join(row) + " |" for row in rows + _rows(columns, sizes)]
    lines += [
        "",
        f"One Python producer, messages of 100 bytes, {sizes.rounds} interleaved rounds of {sizes.seconds:g} s after "
        "one that does not count; medians (least–most). CPU: seconds for a million messages, of client and server.",
        f"{on['processor']}, {on['cores']} cores, {on['memory_gib']} GiB, {on['system']}, Python {on['python']}, "
        f"load average at the start {on['load_average']}, {on['date']}.",
    ]
    lines += [f"{c.broker.name} failed: {why}" for c in columns for why in c.problems]
    if ratios := reached(columns):
        lines += ["", "| round by round | measured | goal | |", "|---|---|---|---|"]
        lines += ["| " + " | ".join(row) + " |" for row in ratios]
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
