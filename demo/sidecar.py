"""The sidecar as a process that can be killed."""

import json
import subprocess
import sys
import time
from pathlib import Path

START_TIMEOUT_SECONDS = 30.0
POLL_SECONDS = 0.05


class Sidecar:
    """A sidecar with its data in a folder, on a free port, which stays the same when it is started again."""

    def __init__(self, folder: Path) -> None:
        self.host = "127.0.0.1"
        self.port = 0
        self._folder = folder
        self._log = folder / "sidecar.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        """Starts the process, and does not wait until it serves."""
        with self._log.open("ab") as log:
            command = [sys.executable, "-m", "broker_sidecar"]
            command += ["--data-directory", str(self._folder / "data"), "--listen", self.address]
            self._process = subprocess.Popen(command, stderr=log)

    def wait_for_port(self) -> None:
        """After the first start: until it serves, and `port` is known."""
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self.port:
            self.check_running()
            if time.monotonic() > deadline:
                raise RuntimeError(f"the sidecar does not serve after {START_TIMEOUT_SECONDS:.0f} s:\n{self._tail()}")
            time.sleep(POLL_SECONDS)
            for line in self._log.read_text().splitlines():
                if '"serving"' in line and (entry := json.loads(line))["event"] == "serving":
                    self.port = int(entry["address"].rpartition(":")[2])

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def check_running(self) -> None:
        """Raises RuntimeError with the end of its log if the process has ended by itself."""
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(f"the sidecar ended with {self._process.returncode}:\n{self._tail()}")

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-10:])
