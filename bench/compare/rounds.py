"""All figures but those under kill -9: in rounds, the servers side by side, one of them measured at a time."""

from contextlib import ExitStack

from bench.compare.broker import Broker, Mode, Server
from bench.compare.client_process import Failed, outcome_of
from bench.compare.column import Column, Places, Sizes, say

LATENCY_MESSAGES = 1_000
MOST_MESSAGES = 1_500_000


def rounds(columns: list[Column], places: Places, sizes: Sizes) -> None:
    """All of them in each broker's first mode; then, where it has a second one, messages a second in that."""
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
                        measured = _round(column.broker, mode, server, places, sizes, number, everything=which == 0)
                    except Failed as e:
                        column.fail(f"round {number}, {mode}: {e}")
                        running.remove((column, mode, server))
                        continue
                    for figure, value in measured.items() if number else ():
                        column.add(figure, value)


def _round(
    broker: Broker, mode: Mode, server: Server, places: Places, sizes: Sizes, number: int, *, everything: bool
) -> dict[str, float]:
    to, topic = (broker, places.cache, server.address), f"round-{number}"
    sent = outcome_of(*to, topic, "publish", seconds=sizes.seconds, most=MOST_MESSAGES)
    measured = {f"published/s, {mode}": sent["messages"] / sent["seconds"]}
    if everything:
        read = outcome_of(*to, topic, "read")
        if read["distinct"] != sent["messages"] or read["messages"] != sent["messages"]:
            raise Failed(f"{read['messages']} messages read where {sent['messages']} were confirmed")
        measured["read/s"] = read["messages"] / read["seconds"]
        single = outcome_of(*to, f"single-{number}", "one_in_flight", seconds=sizes.seconds, most=LATENCY_MESSAGES)
        latencies = sorted(single["latencies"])
        measured["p50 ms"] = latencies[len(latencies) // 2] * 1000
        measured["p99 ms"] = latencies[len(latencies) * 99 // 100] * 1000
    say(f"{broker.name}, round {number}: " + ", ".join(f"{name} {value:.3g}" for name, value in measured.items()))
    return measured
