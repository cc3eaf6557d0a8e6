"""`python -m pulsar_broker` runs a broker until Ctrl-C or SIGTERM; with `get` it only fetches Pulsar."""

import signal
import sys
import time
from types import FrameType

from pulsar_broker.distribution import Unavailable, get
from pulsar_broker.standalone import Broker

_POLL_SECONDS = 0.2


def _ends(number: int, _: FrameType | None) -> None:
    # As an exception, so that the broker is stopped.
    sys.exit(128 + number)


def _serve() -> None:
    with Broker(get()) as broker:
        print("A Pulsar broker for trials. Its data is removed when it ends: with Ctrl-C, or SIGTERM.")
        print(f"  service URL  {broker.service_url}")
        print(f"  admin URL    {broker.admin_url}", flush=True)
        try:
            while True:
                time.sleep(_POLL_SECONDS)
                broker.check_running()
        except SystemExit:
            broker.stop()
            raise


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ends)
    if sys.argv[1:] not in ([], ["get"]):
        sys.exit(__doc__)
    try:
        if sys.argv[1:]:
            print(f"Pulsar is in {get()}")
        else:
            _serve()
    except Unavailable as e:
        sys.exit(f"No Pulsar broker: {e}")


if __name__ == "__main__":
    main()
