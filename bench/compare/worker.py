"""A client process: does one thing with one broker and prints the outcome as lines of JSON.

`python -m bench.compare.worker BROKER ADDRESS TOPIC ACTION JSON`: the actions are publish, ready, steady,
one_in_flight, read, and publish_through_kills, which goes on until its standard input ends.
"""

import importlib
import json
import os
import sys
import threading
from collections.abc import Awaitable
from typing import Any, TextIO, TypeVar

import uvloop

from bench.compare.load import Client, Load, number_of

REPORT_SECONDS = 0.1


T = TypeVar("T")


def _done(work: T | Awaitable[T]) -> T:
    """The outcome of a function, or of a coroutine."""

    async def awaited(awaitable: Awaitable[T]) -> T:
        return await awaitable

    return uvloop.run(awaited(work)) if isinstance(work, Awaitable) else work


def _stop_at_end_of_input(stop: threading.Event) -> None:
    sys.stdin.read()
    stop.set()


def _report(load: Load, ended: threading.Event, out: TextIO) -> None:
    while not ended.wait(REPORT_SECONDS):
        print(json.dumps({"confirmed": load.confirmed()}), file=out, flush=True)


def _publish_through_kills(client: Client, address: str, topic: str, given: dict[str, Any], out: TextIO) -> Load:
    stop, ended = threading.Event(), threading.Event()
    load = Load(**given, stop=stop)
    threading.Thread(target=_stop_at_end_of_input, args=(stop,), daemon=True).start()
    reporter = threading.Thread(target=_report, args=(load, ended, out))
    reporter.start()
    try:
        _done(client.publish(address, topic, load))
    finally:
        ended.set()
        reporter.join()
    return load


def counted(messages: list[bytes], seconds: float) -> dict[str, Any]:
    """What was read: all, and without the doubled ones."""
    return {"messages": len(messages), "distinct": len(set(map(number_of, messages))), "seconds": seconds}


def _outcome(client: Client, address: str, topic: str, action: str, given: dict[str, Any], out: TextIO) -> Any:
    if action == "read":
        messages, seconds = _done(client.read(address, topic))
        return counted(messages, seconds)
    if action == "one_in_flight":
        return {"latencies": _done(client.one_in_flight(address, topic, Load(**given)))}
    if action == "publish_through_kills":
        load = _publish_through_kills(client, address, topic, given, out)
    else:
        load = Load(**given)
        _done(getattr(client, action)(address, topic, load))
    return {"messages": load.sent, "seconds": load.seconds, "latencies": load.latencies} | load.usage


def main() -> None:
    broker, address, topic, action, given = sys.argv[1:]
    # Some libraries log to the standard output: it becomes the standard error, and the outcome has one of its own.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        client: Client = importlib.import_module(f"bench.compare.{broker}")
        outcome = _outcome(client, address, topic, action, json.loads(given), out)
        print(json.dumps({"outcome": outcome}), file=out, flush=True)
        # Not every library's threads let a process end.
        os._exit(0)


if __name__ == "__main__":
    main()
