"""A real sidecar for tests: a process of its own, for the length of a block, to be killed and started again at will."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

START_TIMEOUT_SECONDS = 240.0
"""The first start on a machine compiles: a minute, or several beside much else. One that ends is noticed at once."""
STOP_TIMEOUT_SECONDS = 240.0
_POLL_SECONDS = 0.05
_LINES_SHOWN = 20


def reserved_port() -> socket.socket:
    """A socket bound to a free port of 127.0.0.1, which nobody else is given while it is open. Only a server that asks
    for that very port, and reuses addresses as servers do, may listen there."""
    reserving = socket.socket()
    reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserving.bind(("127.0.0.1", 0))
    return reserving


class Sidecar:
    """A sidecar process, on a free port of 127.0.0.1 that stays its own over restarts.

        with Sidecar(allow_auto_topic_creation=False) as sidecar:
            ...  # publish to sidecar.address
            sidecar.kill()  # -9
            sidecar.start()

    `folder` is where its data directory is made, and stays; left out, that is a temporary one and goes with the block.
    `keys` are keys of the configuration (docs/configuration.md); `environment` is added to this process's own;
    `module` is what `python -m` runs. Keys may be changed between two starts. Needs the extra `seqdedupe[sidecar]`.
    It asks nobody who they are, so that clients need no token, unless `keys` has `authentication="token"`.
    With several `workers` they listen on Unix sockets, and `address` has all of them, with commas between.
    Its methods block; they belong to one thread.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        module: str = "broker_sidecar",
        environment: Mapping[str, str] | None = None,
        workers: int = 1,
        **keys: object,
    ) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="seqdedupe-") if folder is None else None
        self._module = module
        self._environment = dict(environment or {})
        self.folder = Path(self._temporary.name) if self._temporary is not None else Path(folder or "")
        self.keys = keys
        reserving = reserved_port()
        # While the sidecar is down nobody else may get its port.
        weakref.finalize(self, reserving.close)
        self.address = "{}:{}".format(*reserving.getsockname())
        """`host:port` or `unix:path`. With a `listen` among the keys it is known once it serves."""
        self._has_workers = workers > 1
        if self._has_workers:
            # A path below `folder` may be longer than a socket's can be.
            sockets = tempfile.mkdtemp(prefix="seqdedupe-")
            weakref.finalize(self, shutil.rmtree, sockets)
            listen = f"unix:{sockets}/worker"
            self.address = ",".join(f"{listen}.{worker}" for worker in range(workers))
            self.keys = {"workers": workers, "listen": listen} | keys
        self.worker_pids: dict[int, int] = {}
        """The processes of workers that run now, by their numbers from 0 on."""
        self._serving_at: set[str] = set()
        self.log: list[dict[str, Any]] = []
        """What it has logged since the first start, as parsed JSON lines: `event`, `level`, ..."""
        self.errors: list[str] = []
        """What else it has printed to standard error, by lines."""
        self._process: subprocess.Popen[str] | None = None
        self._serving = threading.Event()
        self._reader: threading.Thread | None = None

    @property
    def data(self) -> Path:
        """Its data directory, unless `keys` has another one."""
        return self.folder / "data"

    @property
    def token_file(self) -> Path:
        """With `authentication="token"`: the file with the token, once it serves."""
        return self.data / "token"

    @property
    def pid(self) -> int:
        """The process's number. Raises RuntimeError before the first start."""
        if self._process is None:
            raise RuntimeError("the sidecar was not started yet")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether there is a process now, serving or not."""
        return self._process is not None and self._process.poll() is None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """`spawn` and `wait_until_serving`. Raises RuntimeError if it runs already."""
        self.spawn()
        self.wait_until_serving()

    def spawn(self) -> "subprocess.Popen[str]":
        """Starts the process without waiting for it to serve. Raises RuntimeError if it runs already."""
        if self.is_running:
            raise RuntimeError(f"the sidecar runs already, as process {self.pid}: kill or stop it first")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._serving.clear()
        self._serving_at.clear()
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", self._module, *self._flags()],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | self._environment,
        )
        self._reader = threading.Thread(target=self._read, args=(process,), daemon=True)
        self._reader.start()
        return process

    def _flags(self) -> list[str]:
        flags: list[str] = []
        keys = {"data_directory": self.data, "listen": self.address, "authentication": "none"} | self.keys
        for name, value in keys.items():
            flag = name.replace("_", "-")
            if isinstance(value, bool):
                flags.append(f"--{flag}" if value else f"--no-{flag}")
            else:
                flags += [f"--{flag}", str(value)]
        return flags

    def wait_until_serving(self, timeout_seconds: float | None = None) -> None:
        """Until it serves; left out: START_TIMEOUT_SECONDS for each of its processes. Raises RuntimeError with
        what it printed if it ends instead, or does not in time."""
        if timeout_seconds is None:
            timeout_seconds = START_TIMEOUT_SECONDS * (self.address.count(",") + 1)
        waited = 0.0
        while not self._serving.wait(_POLL_SECONDS):
            self.check_running()
            waited += _POLL_SECONDS
            if waited > timeout_seconds:
                raise RuntimeError(f"the sidecar does not serve after {timeout_seconds:.0f} s: {self._last_lines()}")

    def check_running(self) -> None:
        """Raises RuntimeError with the end of what it printed if the process has ended by itself."""
        process = self._process
        if process is not None and process.poll() is not None:
            self._join()
            raise RuntimeError(f"the sidecar ended with {process.returncode}: {self._last_lines()}")

    def _last_lines(self) -> str:
        events = [str(entry.get("event")) for entry in self.log]
        return "\n".join((events + self.errors)[-_LINES_SHOWN:])

    def _read(self, process: "subprocess.Popen[str]") -> None:
        if process.stderr is None:
            return
        with process.stderr as lines:
            for line in lines:
                try:
                    entry = json.loads(line)
                except ValueError:
                    self.errors.append(line.rstrip())
                    continue
                self.log.append(entry)
                self._look_at(entry)

    def _look_at(self, entry: dict[str, Any]) -> None:
        if entry["event"] == "worker started":
            self.worker_pids[entry["worker"]] = entry["pid"]
        elif entry["event"] == "worker ended":
            self._serving.clear()
            self.worker_pids.pop(entry["worker"], None)
            self._serving_at.discard(self.address.split(",")[entry["worker"]])
        elif entry["event"] == "serving":
            self._serving_at.add(entry["address"])
            if not self._has_workers:
                self.address = entry["address"]
            if not self._has_workers or self._serving_at.issuperset(self.address.split(",")):
                self._serving.set()

    def _join(self) -> None:
        if self._reader is not None:
            self._reader.join()

    def kill(self) -> None:
        """kill -9."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(STOP_TIMEOUT_SECONDS)
        for pid in self.worker_pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.worker_pids.clear()
        self.wait()

    def stop(self) -> int:
        """SIGTERM: it drains. Returns the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def restart(self) -> None:
        """kill -9, and start again."""
        self.kill()
        self.start()

    def close(self) -> None:
        """kill -9; a temporary folder is removed."""
        self.kill()
        if self._temporary is not None:
            self._temporary.cleanup()

    def signal(self, number: int) -> None:
        """Sends a signal, if the process is still there."""
        if self._process is not None and self.is_running:
            self._process.send_signal(number)

    def wait(self) -> int:
        """Waits for the process to end; returns the exit status. Raises subprocess.TimeoutExpired."""
        if self._process is None:
            return 0
        status = self._process.wait(STOP_TIMEOUT_SECONDS)
        self._join()
        return status
