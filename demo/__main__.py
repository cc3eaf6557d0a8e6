"""`python -m demo`: publishes real flights through kill -9 and a bad network, then proves what the topic holds."""

import argparse
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from types import FrameType
from typing import NoReturn

from demo.check import Tally, check
from demo.flights import ORIGINS, TOTAL
from demo.producer import TOPIC
from demo.run import Run
from seqdedupe.client.blocking import Client
from seqdedupe.errors import SeqdedupeError

READY_TIMEOUT_SECONDS = 30.0

NEXT = """\
To try next:
  {bin}/python -m demo --no-deduplication                  the same without deduplication: see the doubles
  {bin}/seqdedupe serve --data-directory data              a sidecar of your own; then, in another terminal:
  {bin}/seqdedupe publish FILE --topic t --producer p      any file of lines or CSV; stop it, start it again"""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--flights", type=int, default=TOTAL, metavar="N", help="publish only the first N flights")
    parser.add_argument("--no-deduplication", action="store_true", help="switch it off for the topic, to compare")
    return parser.parse_args()


def main() -> int:
    """Runs the demo; the exit status is 0 if nothing is missing, doubled or changed, though there were resends."""
    arguments = _arguments()
    flights = max(1, min(arguments.flights, TOTAL))
    signal.signal(signal.SIGTERM, _end)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="seqdedupe-demo-") as folder, Run(Path(folder), flights) as run:
        print(f"{flights:,} flights, three producers ({', '.join(ORIGINS)}), one topic. Starting the sidecar.")
        run.start_sidecar()
        with Client(run.sidecar.address) as client:
            client.wait_ready(READY_TIMEOUT_SECONDS)
            client.admin.create_topic(TOPIC, deduplication_enabled=not arguments.no_deduplication)
            run.publish()
            print("Reading the topic and comparing it with the CSV file, field by field.")
            client.wait_ready(READY_TIMEOUT_SECONDS)
            with client.reader(TOPIC) as reader:
                tallies = check(reader, flights)
        print_table(run, tallies)
        print(f"\nTook {time.monotonic() - began:.0f} s.")
        status = verdict(run, tallies)
    if status and arguments.no_deduplication:
        print("That is what resends do without deduplication.")
    return status


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def print_table(run: Run, tallies: dict[str, Tally]) -> None:
    """What was sent and answered, and what the log holds."""
    heads = ("", "sent", "NotDup", "Dup", "Unknown", "in the log", "missing", "doubled")
    rows = {
        origin: (
            *(run.board.get(origin, column) for column in ("sent", "not_dup", "dup", "unknown")),
            *(tallies[origin].in_the_log, tallies[origin].missing, tallies[origin].doubled),
        )
        for origin in ORIGINS
    }
    totals = [sum(column) for column in zip(*rows.values(), strict=True)]
    print("\n" + "".join(f"{head:>11}" for head in heads))
    for name, numbers in [*rows.items(), ("total", totals)]:
        print(f"{name:>11}" + "".join(f"{number:>11,}" for number in numbers))
    unanswered = totals[0] - sum(totals[1:4])
    print(f"Of those sent, {unanswered:,} got no verdict: it was lost on the way, or one side was killed.")


def verdict(run: Run, tallies: dict[str, Tally]) -> int:
    """Says what it means; returns the exit status."""
    missing = sum(tally.missing for tally in tallies.values())
    doubled = sum(tally.doubled for tally in tallies.values())
    wrong = sum(tally.wrong for tally in tallies.values())
    disordered = sum(tally.disordered for tally in tallies.values())
    fields = sum(tally.fields for tally in tallies.values())
    if missing or doubled or wrong or disordered:
        print(f"FAILED: {missing:,} missing, {doubled:,} doubled, {wrong:,} fields wrong, {disordered:,} out of order.")
        return 1
    if not run.board.total("dup"):
        print("FAILED: nothing was sent twice, so nothing is proved.")
        return 1
    print(
        f"{fields:,} fields compared, none differs; each flight is there exactly once, in order, after "
        f"{run.sidecar_kills} kills of the sidecar, {run.producer_kills} of a producer and "
        f"{run.board.total('lost_answers')} losses of answers.\n"
    )
    print(NEXT.format(bin=os.path.relpath(Path(sys.executable).parent)))
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("\nStopped.", file=sys.stderr)
        sys.exit(130)
    except (SeqdedupeError, RuntimeError, OSError) as e:
        print(f"demo: {e}", file=sys.stderr)
        sys.exit(1)
