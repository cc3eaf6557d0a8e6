"""What is lost and doubled when a broker is killed again and again under load. Each is by itself."""

import time
from typing import Any

from bench.compare.broker import Server, Unavailable
from bench.compare.client_process import Failed, Progress, outcome_of, spawn
from bench.compare.column import Column, Places, say

MESSAGES_A_SECOND = 10_000
CONFIRMED_BEFORE_KILL = 5_000
SECONDS_BEFORE_KILL = 2.0
"""More of load, so that messages are under way and no topic is just being made."""
MOST_MESSAGES = 1_000_000
MOST_SECONDS = 400.0
TOPIC = "killed"


def kills(columns: list[Column], places: Places, times: int) -> None:
    for column in columns:
        if column.not_available is not None or times == 0:
            continue
        with column.serving(places, next(iter(column.broker.modes))) as server:
            if server is None:
                continue
            try:
                sent = _publish_through_kills(column, places, server, times)
                read = outcome_of(column.broker, places.cache, server.address, TOPIC, "read")
            except (Failed, Unavailable) as e:
                column.fail(f"under kill -9: {e}")
                continue
        column.killed = lost_and_doubled(sent, read)
        say(f"{column.broker.name}, kill -9: {column.killed}")


def lost_and_doubled(sent: int, read: dict[str, Any]) -> dict[str, int]:
    """Each of the messages sent was confirmed, and should have been read once."""
    distinct = int(read["distinct"])
    return {"messages": sent, "lost": sent - distinct, "doubled": int(read["messages"]) - distinct}


def _publish_through_kills(column: Column, places: Places, server: Server, times: int) -> int:
    """The messages sent, each of them confirmed in the end."""
    given = {"seconds": MOST_SECONDS, "most": MOST_MESSAGES, "a_second": MESSAGES_A_SECOND}
    with spawn(column.broker, places.cache, server.address, TOPIC, "publish_through_kills", **given) as process:
        assert process.stdin is not None
        progress = Progress(process)
        try:
            for number in range(times):
                progress.wait_for_more(CONFIRMED_BEFORE_KILL)
                time.sleep(SECONDS_BEFORE_KILL)
                server.kill()
                server.start()
                say(f"{column.broker.name}, killed {number + 1} times")
            progress.wait_for_more(CONFIRMED_BEFORE_KILL)
            process.stdin.close()
            return int(progress.outcome()["messages"])
        finally:
            process.kill()
