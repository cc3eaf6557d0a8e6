"""What the brokers share: getting software by the registries' own clients, and a server as a process."""

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

START_SECONDS = 90.0
GET_SECONDS = 600.0
CLIENTS = ("confluent-kafka==2.16.1", "nats-py==2.16.0", "pulsar-client==3.13.0", "rstream==1.1.1", "uvloop==0.23.0")
_PR_SET_PDEATHSIG = 1


class Unavailable(Exception):
    """The broker cannot be had on this machine, or does not start: why."""


class Mode(StrEnum):
    SYNCED = "synced"
    """Confirmed means that it has been synced to the disk."""
    PAGE_CACHE = "page cache"
    """Confirmed means that the kernel has it: it survives kill -9, but no power cut."""


@dataclass(frozen=True)
class Broker:
    """One of those compared. Its module has the functions of `load.Client` too, under the same name as `module`."""

    name: str
    module: str
    version: str
    client: str
    modes: Mapping[Mode, str]
    """How each mode is set; the first one is what all but messages a second are measured with."""
    deduplication: str
    get: Callable[[Path], None]
    """Puts what is needed into the cache folder. Raises Unavailable."""
    serve: Callable[[Path, Path, Mode], AbstractContextManager["Server"]]
    """A started server, given the cache and a data folder; stopped at the end. Raises Unavailable."""
    own_client: bool = False
    """Its client is this project's, and runs in this project's environment."""
    takes_batches: bool = False
    """Its module has the function of `load.BatchClient`."""

    def python(self, cache: Path) -> Path:
        """The interpreter that has its client."""
        return Path(sys.executable) if self.own_client else cache / "clients" / "bin" / "python"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(*command: str | Path, **environment: str) -> str:
    """What a command prints. Raises Unavailable with the end of it if it fails."""
    if shutil.which(command[0]) is None:
        raise Unavailable(f"there is no {command[0]}")
    try:
        done = subprocess.run(
            command,
            cwd=tempfile.gettempdir(),  # some leave files of their own where they run
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=GET_SECONDS,
        )
    except subprocess.TimeoutExpired as e:
        raise Unavailable(f"{Path(command[0]).name} has taken more than {GET_SECONDS:g} seconds") from e
    if done.returncode:
        last = (done.stdout.strip().splitlines() or ["nothing printed"])[-1]
        raise Unavailable(f"{Path(command[0]).name} ended with {done.returncode}: {last}")
    return done.stdout


def get_clients(cache: Path) -> None:
    """A virtual environment with the brokers' Python clients. Raises Unavailable."""
    done = cache / "clients" / " ".join(CLIENTS).replace("==", "-")
    if done.exists():
        return
    run(sys.executable, "-m", "venv", "--clear", cache / "clients")
    run(cache / "clients" / "bin" / "python", "-m", "pip", "install", "--quiet", *CLIENTS)
    done.touch()


class Server:
    """A server process in a process group of its own, which ends with this process whatever happens."""

    def __init__(
        self, address: str, folder: Path, command: Sequence[str | Path], is_ready: Callable[[], bool], **more: str
    ) -> None:
        self.address = address
        self._folder = folder
        self._command = command
        self._is_ready = is_ready
        self._environment = os.environ | more
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def session(self) -> int:
        """That of its processes."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Returns when it is ready. Raises Unavailable if it ends instead, or takes too long."""
        with (self._folder / "printed").open("ab") as printed:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        limit = time.monotonic() + START_SECONDS
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > limit:
                ended = self._process.returncode
                self.kill()
                text = (self._folder / "printed").read_text(errors="replace").strip()
                why = "not ready in time" if ended is None else f"ended with {ended}"
                raise Unavailable(f"{why}: {text[-300:]}")
            time.sleep(0.05)

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    @contextmanager
    def running(self) -> Iterator["Server"]:
        try:
            self.start()
            yield self
        finally:
            self.kill()


def listens(address: str) -> bool:
    """Whether a server accepts connections there."""
    host, port = address.rsplit(":", 1)
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True
