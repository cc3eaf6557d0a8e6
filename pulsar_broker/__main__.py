"""`python -m pulsar_broker` runs a broker until Ctrl-C or SIGTERM; `get` only fetches Pulsar, and prepares starts."""

import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

from pulsar_broker import quick
from pulsar_broker.distribution import Unavailable, get
from pulsar_broker.standalone import Broker
from seqdedupe.testing import Stalled

_POLL_SECONDS = 0.2


def _ends(number: int, _: FrameType | None) -> None:
    # As an exception, so that the broker is stopped.
    sys.exit(128 + number)


def _serve() -> None:
    with Broker(get()) as broker:
        print("A Pulsar broker for trials. End it with Ctrl-C or SIGTERM, which removes its data.")
        print(f"  service URL  {broker.service_url}")
        print(f"  admin URL    {broker.admin_url}", flush=True)
        try:
            while True:
                time.sleep(_POLL_SECONDS)
                broker.check_running()
        except SystemExit:
            broker.stop()
            raise


def _prepare(home: Path) -> None:
    """Have a broker write an archive of its classes when it ends, if there is none."""

    def write(archive: Path) -> None:
        broker = Broker(home)
        broker.environment = quick.archived(home, "ArchiveClassesAtExit", archive)
        with broker:
            broker.stop()

    try:
        quick.archive(home).make(write)
    except (OSError, subprocess.SubprocessError, Stalled) as e:
        print(f"No archive of classes could be written, so brokers start more slowly: {e}")


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ends)
    if sys.argv[1:] not in ([], ["get"]):
        sys.exit(__doc__)
    try:
        if sys.argv[1:]:
            print(f"Pulsar is in {(home := get())}")
            _prepare(home)
        else:
            _serve()
    except (Unavailable, Stalled) as e:
        sys.exit(f"No Pulsar broker: {e}")


if __name__ == "__main__":
    main()
