"""`python -m demo`: publishes real flights through kill -9 and a bad network, and reads them into a table through more.

Then it proves what topic and table hold.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

from demo.check import Tally, check, check_rows
from demo.flights import ORIGINS, TOTAL
from demo.job import KILL_AT, ReaderJob, audit
from demo.producer import TOPIC
from demo.run import Run
from pulsar_broker.distribution import Unavailable, get
from pulsar_broker.standalone import Broker
from seqdedupe.client.blocking import Client
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import LAST_RESORT_SECONDS
from seqdedupe_spark.session import check_java

NEXT = """\
To try next:
  {bin}/python -m demo --no-deduplication                  the same without deduplication: see the doubles
  {bin}/python -m demo --pulsar                            the same with a real Pulsar broker as the log
  {bin}/seqdedupe serve --data-directory data              a sidecar of your own; then, in another terminal:
  export SEQDEDUPE_TOKEN_FILE=$PWD/data/token
  {bin}/seqdedupe publish FILE --topic t --producer p      any file of lines or CSV; stop it, start it again
  {bin}/seqdedupe job run --job j --topic t --store sqlite:///t.db --table t     and into a table"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--flights", type=int, default=TOTAL, metavar="N", help="publish only the first N flights")
    parser.add_argument(
        "--no-deduplication", action="store_true", help="switch deduplication off for the topic, to compare"
    )
    parser.add_argument("--pulsar", action="store_true", help="keep the messages in a real Pulsar broker")
    return parser.parse_args()


def main() -> int:
    """Runs the demo; the exit status is 0 if nothing is missing, doubled or changed, though there were resends."""
    arguments = _arguments()
    flights = max(1, min(arguments.flights, TOTAL))
    signal.signal(signal.SIGTERM, _end)
    os.environ.setdefault("PYTHONFAULTHANDLER", "1")  # of processes that do not end
    check_java()
    began = time.monotonic()
    with (
        tempfile.TemporaryDirectory(prefix="seqdedupe-demo-") as folder,
        log_keys(is_pulsar=arguments.pulsar) as keys,
        Run(Path(folder), flights, **keys) as run,
    ):
        print(f"{flights:,} flights, three producers ({', '.join(ORIGINS)}), one topic. Starting the sidecar.")
        run.start_sidecar()
        with Client(run.sidecar.address) as client:
            client.wait_ready(LAST_RESORT_SECONDS)
            client.admin.create_topic(TOPIC, deduplication_enabled=not arguments.no_deduplication)
            run.publish()
            print("Reading the topic and comparing it with the CSV file, field by field.", flush=True)
            client.wait_ready(LAST_RESORT_SECONDS)
            with client.reader(TOPIC) as reader:
                topic = check(reader, flights)
        with ReaderJob(Path(folder), run.sidecar.address, flights, deduplicate=arguments.no_deduplication) as job:
            print("Reading the topic into a SQLite table with a Spark job, which takes a while to start.", flush=True)
            job.read(run.say, kill_at=() if arguments.no_deduplication else KILL_AT)
            table = check_rows(job.rows(), flights)
        print("Auditing the topic with another Spark job.", flush=True)
        audited, report = audit(run.sidecar.address)
        print(report.rstrip())
        print_table(run, topic, table)
        print(f"\nTook {time.monotonic() - began:.0f} s.")
        status = verdict(run, job, topic, table) or audited
    if status and arguments.no_deduplication:
        print("Without deduplication, resends double messages. The reader job has dropped the copies: --deduplicate.")
    return status


@contextmanager
def log_keys(*, is_pulsar: bool) -> Iterator[dict[str, object]]:
    """The keys of a sidecar whose messages are where they should be: in a broker that is there for the block, say."""
    if not is_pulsar:
        yield {}
        return
    print("Starting a Pulsar broker, which holds the messages.", flush=True)
    with Broker(get()) as broker:
        yield broker.sidecar_keys


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def print_table(run: Run, topic: dict[str, Tally], table: dict[str, Tally]) -> None:
    """What was sent and answered, and what the log and the table hold."""
    heads = ("", "sent", "NotDup", "Dup", "Unknown", "in log", "missing", "doubled", "in table", "missing", "doubled")
    rows = {
        origin: (
            *(run.board.get(origin, column) for column in ("sent", "not_dup", "dup", "unknown")),
            *(n for tally in (topic[origin], table[origin]) for n in (tally.found, tally.missing, tally.doubled)),
        )
        for origin in ORIGINS
    }
    totals = [sum(column) for column in zip(*rows.values(), strict=True)]
    print("\n" + "".join(f"{head:>9}" for head in heads))
    for name, numbers in [*rows.items(), ("total", totals)]:
        print(f"{name:>9}" + "".join(f"{number:>9,}" for number in numbers))
    unanswered = totals[0] - sum(totals[1:4])
    print(f"{unanswered:,} of the messages sent got no verdict: it was lost on the way, or one side was killed.")


def verdict(run: Run, job: ReaderJob, topic: dict[str, Tally], table: dict[str, Tally]) -> int:
    """Says what it means; returns the exit status."""
    failed = False
    for what, tallies in (("topic", topic.values()), ("table", table.values())):
        missing, doubled = sum(tally.missing for tally in tallies), sum(tally.doubled for tally in tallies)
        wrong, disordered = sum(tally.wrong for tally in tallies), sum(tally.disordered for tally in tallies)
        if missing or doubled or wrong or disordered:
            failed = True
            print(
                f"FAILED: of the {what} {missing:,} are missing, {doubled:,} doubled, {disordered:,} out of order, "
                f"{wrong:,} fields wrong."
            )
    if failed:
        return 1
    if not run.board.total("dup"):
        print("FAILED: nothing was sent twice, so nothing is proved.")
        return 1
    fields = sum(tally.fields for tally in (*topic.values(), *table.values()))
    kills = f"{run.sidecar_kills} kills of the sidecar, {run.producer_kills} of a producer, {job.kills} of the reader"
    print(
        f"{fields:,} fields compared, none differs; each flight is in the topic and in the table exactly once, in "
        f"order,\nafter {kills}, and {run.board.total('lost_answers')} losses of answers.\n"
    )
    print(NEXT.format(bin=os.path.relpath(Path(sys.executable).parent)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(130)
    except (SeqdedupeError, Unavailable, RuntimeError, OSError) as e:
        print(f"demo: {e}", file=sys.stderr)
        sys.exit(1)
