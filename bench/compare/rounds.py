"""All figures but those under kill -9: in rounds, the servers side by side, one of them measured at a time."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from bench.compare.broker import Broker, Mode, Server
from bench.compare.client_process import Failed, outcome_of
from bench.compare.column import Column, Places, Sizes, say
from bench.figure import percentiles_ms

LATENCY_MESSAGES = 1_000
MOST_MESSAGES = 1_500_000
MESSAGES_PER_SECOND = 20_000

Do = Callable[..., dict[str, Any]]
"""Does an action by a client process, to the topic that is given with it."""


def rounds(columns: list[Column], places: Places, sizes: Sizes) -> None:
    """All of them in each broker's first mode, then in its second one, if it has two."""
    for which in (0, 1):
        with ExitStack() as servers:
            running: list[tuple[Column, Mode, Server]] = []
            for column in columns:
                modes = list(column.broker.modes)
                if column.not_available is None and len(modes) > which:
                    server = servers.enter_context(column.serving(places, modes[which]))
                    if server is not None:
                        running.append((column, modes[which], server))
            for number in range(sizes.rounds + 1):
                for column, mode, server in list(running):
                    try:
                        measured = _round(column.broker, server, places, sizes, number)
                    except Failed as e:
                        column.fail(f"round {number}, {mode}: {e}")
                        running.remove((column, mode, server))
                        continue
                    values = ", ".join(f"{name} {value:.3g}" for name, value in measured.items())
                    say(f"{column.broker.name}, {mode}, round {number}: {values}")
                    for figure, value in measured.items() if number else ():
                        column.add(f"{figure}, {mode}", value)


def _round(broker: Broker, server: Server, places: Places, sizes: Sizes, number: int) -> dict[str, float]:
    def do(action: str, topic: str, **given: Any) -> dict[str, Any]:
        return outcome_of(broker, places.cache, server.address, f"{topic}-{number}", action, **given)

    for_seconds = {"seconds": sizes.seconds, "most": MOST_MESSAGES, "server": server.session}
    measured = _published_and_read(do, for_seconds)
    if broker.takes_batches:
        sent = do("ready", "ready", **for_seconds)
        measured |= {"ready/s": sent["messages"] / sent["seconds"], "ready CPU": _cpu(sent)}
    sent = do("steady", "steady", **for_seconds, a_second=MESSAGES_PER_SECOND)
    if len(sent["latencies"]) != sent["messages"]:
        raise Failed(f"{len(sent['latencies'])} confirmations of {sent['messages']} messages")
    measured |= {"steady/s": sent["messages"] / sent["seconds"], "steady CPU": _cpu(sent)}
    measured |= percentiles_ms(sent["latencies"], "steady ")
    sent = do("one_in_flight", "single", seconds=sizes.seconds, most=LATENCY_MESSAGES)
    return measured | percentiles_ms(sent["latencies"], "single ")


def _published_and_read(do: Do, for_seconds: dict[str, Any]) -> dict[str, float]:
    sent = do("publish", "published", **for_seconds)
    read = do("read", "published")
    if read["distinct"] != sent["messages"] or read["messages"] != sent["messages"]:
        raise Failed(f"{read['messages']} messages read where {sent['messages']} were confirmed")
    return {
        "published/s": sent["messages"] / sent["seconds"],
        "published CPU": _cpu(sent),
        "server MB": sent["server_mb"],
        "client MB": sent["client_mb"],
        "read/s": read["messages"] / read["seconds"],
    }


def _cpu(sent: dict[str, Any]) -> float:
    """Seconds of the processor for a million messages, of client and server together."""
    seconds: float = sent["client_cpu_seconds"] + sent["server_cpu_seconds"]
    return seconds * 1e6 / int(sent["messages"])
