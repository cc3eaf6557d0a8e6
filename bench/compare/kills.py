"""What is lost and doubled when a broker is killed again and again under load. Each is by itself."""

from bench.compare.broker import Server, Unavailable
from bench.compare.client_process import Failed, Progress, outcome_of, spawn
from bench.compare.column import Column, Places, say

MESSAGES_A_SECOND = 10_000
CONFIRMED_BEFORE_KILL = 5_000
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
        lost, doubled = sent - read["distinct"], read["messages"] - read["distinct"]
        column.killed = {"messages": sent, "lost": lost, "doubled": doubled}
        say(f"{column.broker.name}, kill -9: {column.killed}")


def _publish_through_kills(column: Column, places: Places, server: Server, times: int) -> int:
    """The messages sent, each of them confirmed in the end."""
    given = {"seconds": MOST_SECONDS, "most": MOST_MESSAGES, "a_second": MESSAGES_A_SECOND}
    with spawn(column.broker, places.cache, server.address, TOPIC, "publish_through_kills", **given) as process:
        assert process.stdin is not None
        progress = Progress(process)
        try:
            for number in range(times):
                progress.wait_for_more(CONFIRMED_BEFORE_KILL)
                server.kill()
                server.start()
                say(f"{column.broker.name}, killed {number + 1} times")
            progress.wait_for_more(CONFIRMED_BEFORE_KILL)
            process.stdin.close()
            return int(progress.outcome()["messages"])
        finally:
            process.kill()
