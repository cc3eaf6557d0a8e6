"""What must be reached beside Kafka that flushes each set of messages: ratios, each of one round's measurements."""

import statistics
from collections.abc import Callable, Mapping

from bench.compare.broker import Mode
from bench.compare.column import Column
from bench.figure import Ratio

OURS, THEIRS = "embedded", "kafka"


def _over(figure: str, *theirs: str) -> Callable[[Mapping[str, float]], float]:
    """Ours ÷ the best of theirs."""
    return lambda m: m[f"{OURS} {figure}"] / max(m[f"{THEIRS} {one}"] for one in theirs or (figure,))


RATIOS = [
    Ratio("one in flight, p50 ÷ Kafka's", _over("single p50"), at_most=1.2),
    Ratio("20,000 messages/s, CPU ÷ Kafka's", _over("steady CPU"), at_most=1.3),
    Ratio("20,000 messages/s, p99 ÷ Kafka's", _over("steady p99"), at_most=1),
    Ratio("ready batches, messages/s ÷ Kafka's best", _over("ready/s", "ready/s", "published/s"), at_least=2.2),
    Ratio("one a call, messages/s ÷ Kafka's", _over("published/s"), at_least=1.5),
]


def reached(columns: list[Column]) -> list[list[str]]:
    """A row for each ratio: median (least–most), its goal, whether that is reached. None unless both were measured."""
    of = {column.broker.module: _rounds(column) for column in columns}
    # One that has failed has fewer rounds.
    both = [ours | theirs for ours, theirs in zip(of.get(OURS, []), of.get(THEIRS, []), strict=False)]
    rows = []
    for ratio in RATIOS if both else ():
        values = [ratio.value(measured) for measured in both]
        middle = statistics.median(values)
        spread = f"{middle:.2f} ({min(values):.2f}–{max(values):.2f})"
        rows.append([ratio.name, spread, ratio.goal, "reached" if ratio.is_reached(middle) else "not reached"])
    return rows


def _rounds(column: Column) -> list[dict[str, float]]:
    """What was measured durable, by round."""
    suffix = f", {Mode.SYNCED}"
    synced = {name.removesuffix(suffix): values for name, values in column.figures.items() if name.endswith(suffix)}
    names = [f"{column.broker.module} {name}" for name in synced]
    return [dict(zip(names, values, strict=True)) for values in zip(*synced.values(), strict=True)]
