"""A real sidecar process, to be killed at will."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_SECONDS = 60.0


class Sidecar:
    """A sidecar on a free port of 127.0.0.1; the port stays the same over restarts.

    `keys` are keys of the configuration; `module` is what is run. `log` holds what it has logged, as parsed JSON lines,
    over all starts.
    """

    def __init__(self, folder: Path, *, module: str = "broker_sidecar", **keys: object) -> None:
        self._module = module
        self.folder = folder
        self.keys = keys
        self.address = "127.0.0.1:0"
        self.log: list[dict[str, Any]] = []
        self.errors: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._serving = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def data(self) -> Path:
        return self.folder / "data"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def spawn(self) -> subprocess.Popen[str]:
        """Starts the process without waiting for it to serve."""
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = {"data_directory": self.data, "listen": self.address} | self.keys
        command = [sys.executable, "-m", self._module]
        for name, value in flags.items():
            flag = "--" + name.replace("_", "-")
            if isinstance(value, bool):
                command.append(flag if value else "--no-" + name.replace("_", "-"))
            else:
                command += [flag, str(value)]
        self._serving.clear()
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
        self._reader = threading.Thread(target=self._read, args=(self._process,), daemon=True)
        self._reader.start()
        return self._process

    def start(self) -> None:
        """Starts it; returns when it serves. Raises RuntimeError with what it printed if it ends instead."""
        process = self.spawn()
        while not self._serving.wait(0.05):
            if process.poll() is not None:
                self._join()
                if not self._serving.is_set():
                    raise RuntimeError(f"the sidecar ended with {process.returncode}: " + "\n".join(self.errors[-20:]))

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def _read(self, process: "subprocess.Popen[str]") -> None:
        assert process.stderr is not None
        for line in process.stderr:
            try:
                entry = json.loads(line)
            except ValueError:
                self.errors.append(line.rstrip())
                continue
            self.log.append(entry)
            if entry["event"] == "serving":
                self.address = entry["address"]
                self._serving.set()
        process.stderr.close()

    def _join(self) -> None:
        if self._reader is not None:
            self._reader.join()

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        self.wait()

    def stop(self) -> int:
        """SIGTERM; returns the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self) -> int:
        """Waits for the process to end; returns the exit status."""
        if self._process is None:
            return 0
        status = self._process.wait(START_TIMEOUT_SECONDS)
        self._join()
        return status

    def restart(self) -> None:
        """kill -9, and start again."""
        self.kill()
        self.start()
