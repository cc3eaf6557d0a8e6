"""A gRPC server that ends while nobody has stopped it: the process ends too, so that a supervisor starts it again."""

import signal
from pathlib import Path

from broker_sidecar.data import EXIT_FATAL
from seqdedupe.testing import Sidecar
from tests.broker_sidecar import ending_server


def test_the_process_ends_with_its_server_and_says_why(tmp_path: Path) -> None:
    also = f"unix:{tmp_path}/socket"
    with Sidecar(tmp_path, module=ending_server.MODULE, also_listen=also) as sidecar:
        # The one of the Unix socket, which is the newest.
        sidecar.signal(signal.SIGUSR1)
        assert sidecar.wait() == EXIT_FATAL
        [end] = [line for line in sidecar.log if line["level"] == "critical"]
        assert end["event"] == f"the sidecar ends: its gRPC server at {also} has ended unexpectedly"
        sidecar.start()
        assert sidecar.stop() == 0
