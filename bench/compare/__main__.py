"""What it takes beside other brokers, each a real one, on this machine. See docs/internals/benchmarks.md."""

import argparse
import json
import os
import signal
import sys
import tempfile
from pathlib import Path
from types import FrameType

from bench.compare import embedded, kafka, nats, pulsar, rabbitmq
from bench.compare.column import Places, Sizes, prepare
from bench.compare.kills import kills
from bench.compare.rounds import rounds
from bench.compare.table import as_json, machine, markdown

BROKERS = {b.module: b for b in (embedded.BROKER, pulsar.BROKER, kafka.BROKER, rabbitmq.BROKER, nats.BROKER)}
FULL = Sizes(rounds=3, seconds=3, kills=3)
QUICK = Sizes(rounds=1, seconds=1, kills=1)
# Memory that is given back is slow to get again on a virtual machine.
KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
}


def _ends(number: int, _: FrameType | None) -> None:
    # As an exception, so that every server is stopped.
    sys.exit(128 + number)


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.compare", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a trial in three minutes, not to be quoted")
    parser.add_argument("--brokers", nargs="+", choices=BROKERS, default=list(BROKERS), help="which; all by default")
    parser.add_argument("--rounds", type=int, help="rounds that count")
    parser.add_argument("--seconds", type=float, help="how long each publishes in a round")
    parser.add_argument("--kills", type=int, help="how often each broker is killed")
    parser.add_argument(
        "--cache", type=Path, default=Path.home() / ".cache" / "seqdedupe-bench", help="for what is got"
    )
    parser.add_argument("--folder", type=Path, help="for data, on the disk to be measured; the cache if not given")
    parser.add_argument("--json", type=Path, help="a file to write every value to")
    given = parser.parse_args()
    usual = QUICK if given.quick else FULL
    sizes = Sizes(
        rounds=given.rounds or usual.rounds,
        seconds=given.seconds or usual.seconds,
        kills=usual.kills if given.kills is None else given.kills,
    )
    signal.signal(signal.SIGTERM, _ends)
    os.environ.update(KEEP_MEMORY)
    given.cache.mkdir(parents=True, exist_ok=True)
    columns = prepare([BROKERS[name] for name in given.brokers], given.cache.absolute())
    on = machine()
    with tempfile.TemporaryDirectory(dir=given.folder or given.cache, prefix="data-") as folder:
        places = Places(given.cache.absolute(), Path(folder).absolute())
        rounds(columns, places, sizes)
        kills(columns, places, sizes.kills)
    print(markdown(columns, sizes, on))
    if given.json is not None:
        given.json.write_text(json.dumps(as_json(columns, sizes, on), indent=1) + "\n")


if __name__ == "__main__":
    main()
