"""The display of `seqdedupe top`. It needs the package rich, which the extra `top` installs.

Pass all text from outside through `_text`. Otherwise rich would interpret brackets in the text as markup.
"""

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from seqdedupe.command import printable, standard_output
from seqdedupe.errors import UnavailableError
from seqdedupe.figures import counted, duration, merged, per_second, short
from seqdedupe.topic_facts import beyond_snapshot, state_name
from seqdedupe.v1 import admin_pb2

WARNINGS = 3
"""The number of warnings below the topics."""

_LINES_BESIDE = 9 + WARNINGS
"""The lines of the screen that do not show topics."""

_BARS = "▁▂▃▄▅▆▇█"
_BARS_SHOWN = 25
_INTERVALS = 200
"""The number of past intervals that a sidecar reports."""
_WIDE = 120
"""The width, in columns, of a terminal in which all columns of the table have room."""
_END_KEYS = (b"q", b"Q", b"\x03", b"")

_STYLES = {
    admin_pb2.TOPIC_STATE_SERVING: "green",
    admin_pb2.TOPIC_STATE_DAMAGED: "red",
    admin_pb2.TOPIC_STATE_STANDBY: "blue",
}
"""The styles of states. All other states are yellow."""

Found = admin_pb2.GetStatisticsResponse


def show_once(found: Found, address: str) -> None:
    """Print the statistics once."""
    with standard_output():
        console = Console(highlight=False)
        console.print(_drawn(found, address, console.width, len(found.topics)))


def show(ask: Callable[[], Found], address: str) -> None:
    """Show the statistics, and update them repeatedly until the user presses q."""
    console = Console(highlight=False)
    found, problem = ask(), ""
    with _keys() as pressed, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            room = max(console.height - _LINES_BESIDE, 1)
            live.update(Group(_drawn(found, address, console.width, room), _text(problem, "red")), refresh=True)
            if pressed(found.interval_ms / 1000):
                return
            try:
                found, problem = ask(), ""
            except UnavailableError as e:
                problem = f"This is not up to date: {e}"


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits for a number of seconds. The function returns whether the user has pressed a key that
    ends the display."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield lambda seconds: _ends(descriptor, time.monotonic() + seconds)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _ends(descriptor: int, until: float) -> bool:
    while select.select([descriptor], [], [], max(until - time.monotonic(), 0))[0]:
        if os.read(descriptor, 1) in _END_KEYS:
            return True
    return False


# -- drawing ---------------------------------------------------------------------------------------------------------


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style)


def _drawn(found: Found, address: str, width: int, room: int) -> Group:
    return Group(
        _head(found, address),
        _sums(found),
        Text(),
        _table(found, width, room),
        _more(found, room),
        *(_warning(one) for one in found.warnings[:WARNINGS]),
    )


def _head(found: Found, address: str) -> Text:
    state = ("serving", "green") if found.is_serving else ("not serving", "red")
    states = ", ".join(f"{one.topics:,} {state_name(one.state).replace('_', ' ').lower()}" for one in found.states)
    left = f", {counted(found.replay_left_messages, 'message')} still to be read" if found.replay_left_messages else ""
    return Text.assemble(
        ("seqdedupe ", "bold"),
        _text(f"{address}  "),
        state,
        _text(f"  {found.version}, up {duration(found.uptime_seconds)}  topics: {states or 'none'}{left}", "dim"),
    )


def _sums(found: Found) -> Text:
    activity, interval_ms = found.activity, found.interval_ms
    parts = [
        ("stored", f"{short(per_second(activity.not_dup, interval_ms))}/s"),
        ("", f"{short(per_second(activity.stored_bytes, interval_ms))}B/s"),
        ("dup", f"{short(per_second(activity.dup, interval_ms))}/s"),
        ("unknown", f"{short(sum(activity.unknown))} in 10 min"),
        ("refused", f"{short(sum(activity.refused))} in 10 min"),
    ]
    line = Text()
    for label, value in parts:
        line.append(f"{label} " if label else "", "dim").append(f"{value}   ")
    reasons = ", ".join(f"{one.reason} {short(one.count)}" for one in found.refusals[:3])
    return line.append_text(_text(reasons, "yellow"))


def _table(found: Found, width: int, room: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", expand=True)
    is_wide = width >= _WIDE
    table.add_column("TOPIC", ratio=1, overflow="ellipsis", no_wrap=True)
    table.add_column("STATE", no_wrap=True)
    for head in ("STORED/S", "DUP/S", "UNKNOWN", "REFUSED", "PRODUCERS"):
        table.add_column(head, justify="right", no_wrap=True)
    if is_wide:
        table.add_column("NOT IN A SNAPSHOT", justify="right", no_wrap=True)
        table.add_column("LAST 10 MIN", no_wrap=True)
    for one in found.topics[:room]:
        cells = _cells(one, found.interval_ms)
        table.add_row(*(cells if is_wide else cells[: len(table.columns)]))
    return table


def _cells(one: admin_pb2.TopicStatistics, interval_ms: int) -> tuple[Text, ...]:
    topic, activity, beyond = one.topic, one.activity, beyond_snapshot(one.topic)
    unknown, refused = sum(activity.unknown), sum(activity.refused)
    return (
        _text(topic.name.removeprefix("persistent://public/default/")),
        _text(state_name(topic.state), _STYLES.get(topic.state, "yellow")),
        _text(short(per_second(activity.not_dup, interval_ms))),
        _text(short(per_second(activity.dup, interval_ms))),
        _text(short(unknown), "yellow" if unknown else ""),
        _text(short(refused), "red" if refused else ""),
        _text("?" if beyond is None else short(topic.producers)),
        _text("?" if beyond is None else short(beyond)),
        _text(_bars(activity.not_dup), "cyan"),
    )


def _bars(values: Sequence[int]) -> str:
    """Return past values as a line of bars, with the newest value on the right."""
    sums = merged(values, _INTERVALS // _BARS_SHOWN)
    highest = max(sums, default=0)
    bars = "".join(_BARS[value * (len(_BARS) - 1) // highest] if value else " " for value in sums)
    return bars.rjust(_BARS_SHOWN)


def _more(found: Found, room: int) -> Text:
    hidden = found.topics_found - min(room, len(found.topics))
    return _text(counted(hidden, "more topic") if hidden > 0 else "", "dim")


def _warning(one: admin_pb2.Warning) -> Text:
    at = time.strftime("%H:%M:%S", time.localtime(one.time_ms / 1000))
    text = Text.assemble(_text(f"{at} ", "dim"), _text(f"{one.level.lower()} ", "yellow"), _text(one.message))
    text.no_wrap, text.overflow = True, "ellipsis"
    return text
