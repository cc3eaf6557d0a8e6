"""`seqdedupe bench`: a load generator."""

import asyncio
from typing import IO

import click

from seqdedupe.cli.histogram import Histogram
from seqdedupe.cli.load import Interval, Load, Plan
from seqdedupe.cli.options import common, print_json
from seqdedupe.command import INTERRUPTED, echo
from seqdedupe.errors import SeqdedupeError
from seqdedupe.limits import MAX_PAYLOAD_BYTES
from seqdedupe.names import topic_name

_PERCENTILES = {"p50": 50.0, "p95": 95.0, "p99": 99.0, "p99_9": 99.9, "max": 100.0}
_INTERVAL_PERCENTILES = {"p50": 50.0, "p99": 99.0}
_BYTES_IN_A_MEGABYTE = 1_000_000
_RATE_REACHED = 0.99
"""With less of the rate that was asked for, a person is told."""

_MOST_NAMES = 10_000
"""So many have been tried on a sidecar with its default limits. Each is a task of its own: with thousands of them the
tasks are much of what is measured."""

_Positive = click.IntRange(min=1)


@click.command(short_help="Publish test messages, and show how fast they go.")
@click.argument("topic")
@click.option(
    "--rate", type=_Positive, metavar="N", help="Messages a second, all together. Default: as fast as it goes."
)
@click.option(
    "--size", "size_bytes", type=click.IntRange(0, MAX_PAYLOAD_BYTES), default=1024, show_default=True, metavar="BYTES",
    help="Of a payload.",
)  # fmt: skip
@click.option(
    "--names", type=click.IntRange(1, _MOST_NAMES), default=1, show_default=True, metavar="N",
    help="So many producers, bench-0 and on, which share a connection.",
)  # fmt: skip
@click.option("--messages", type=_Positive, metavar="N", help="End after N messages.")
@click.option("--seconds", type=_Positive, metavar="N", help="End after N seconds. Default: at Ctrl-C.")
@click.option("--histogram", type=click.File("w", lazy=False), help="Write the latencies there, as HdrHistogram does.")
@common
def bench(
    topic: str,
    rate: int | None,
    size_bytes: int,
    names: int,
    messages: int | None,
    seconds: int | None,
    histogram: IO[str] | None,
    address: str,
    as_json: bool,
) -> int:
    """Publish messages of random bytes to TOPIC, where they stay, and show how fast they go and how long receipts take.

    Under --rate a latency counts from when the message was due, also if it was sent later.
    """
    load = Load(Plan(topic_name(topic), size_bytes, names, rate, messages, seconds))
    failure: SeqdedupeError | None = None
    try:
        asyncio.run(load.run(address, _print_json_interval if as_json else _print_interval))
    except SeqdedupeError as e:
        if not load.sent:
            raise
        failure = e
    if histogram is not None:
        histogram.writelines(f"{line}\n" for line in load.total.distribution())
    if as_json:
        print_json({"summary": _summary(load)})
    else:
        _print_summary(load)
    if failure is not None:
        raise failure
    return INTERRUPTED if load.interrupted else 0


def _figures(histogram: Histogram, seconds: float, size_bytes: int, percentiles: dict[str, float]) -> dict[str, object]:
    """The form is documented: keep it stable."""
    rate = histogram.count / seconds if seconds else 0.0
    return {
        "messages": histogram.count,
        "messages_per_second": round(rate, 1),
        "megabytes_per_second": round(rate * size_bytes / _BYTES_IN_A_MEGABYTE, 3),
        **{f"{name}_ms": histogram.percentile_ms(percentile) for name, percentile in percentiles.items()},
    }


def _interval(interval: Interval) -> dict[str, object]:
    figures = _figures(interval.latencies, interval.seconds, interval.size_bytes, _INTERVAL_PERCENTILES)
    return {"elapsed_seconds": round(interval.elapsed_seconds, 3), **figures}


def _print_json_interval(interval: Interval) -> None:
    print_json({"interval": _interval(interval)})


def _print_interval(interval: Interval) -> None:
    figures = _interval(interval)
    echo(f"{interval.elapsed_seconds:6.1f} s  {_rates(figures)}  {_latencies(figures, _INTERVAL_PERCENTILES)}")


def _summary(load: Load) -> dict[str, object]:
    plan = load.plan
    return {
        "topic": plan.topic,
        "producers": plan.names,
        "size_bytes": plan.size_bytes,
        "rate": plan.rate,
        "elapsed_seconds": round(load.elapsed_seconds, 3),
        "not_sent": load.due - load.sent,
        "without_receipt": load.sent - load.total.count,
        **_figures(load.total, load.elapsed_seconds, plan.size_bytes, _PERCENTILES),
    }


def _print_summary(load: Load) -> None:
    plan, figures = load.plan, _summary(load)
    producers = "producer" if plan.names == 1 else "producers"
    echo(f"{load.total.count:,} messages of {plan.size_bytes:,} bytes, {plan.names} {producers}, to {plan.topic}")
    echo(f"{load.elapsed_seconds:6.1f} s  {_rates(figures)}  {_latencies(figures, _PERCENTILES)}")
    if load.due * _RATE_REACHED > load.sent:
        echo(f"the rate was not reached: {load.due - load.sent:,} of {load.due:,} messages that were due were not sent")
    if load.sent > load.total.count:
        echo(f"{load.sent - load.total.count:,} messages sent have no receipt")


def _rates(figures: dict[str, object]) -> str:
    return f"{figures['messages_per_second']:11,.0f} messages/s  {figures['megabytes_per_second']:9,.3f} MB/s"


def _latencies(figures: dict[str, object], percentiles: dict[str, float]) -> str:
    """In milliseconds."""
    found = ((name.replace("_", "."), figures[f"{name}_ms"]) for name in percentiles)
    return "  ".join(f"{name} " + ("-" if value is None else f"{value:,.3f} ms") for name, value in found)
