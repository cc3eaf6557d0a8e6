"""A real sidecar for tests. The sidecar is a separate process, which runs during a `with` block, and can be killed and
started again.

This module also limits waits: `Patience` measures progress, so that a slow machine does not change the result of a
test.
"""

import asyncio
import contextlib
import faulthandler
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import termios
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

STALL_SECONDS = 600.0
"""The time without any change after which a wait has failed. A Spark job that starts on a busy machine is silent for
minutes."""
LAST_RESORT_SECONDS = 900.0
"""The longest wait, with any changes: 15 minutes, or ten times the time on two quiet cores if that is more."""
STACKS_SIGNAL = signal.SIGUSR2
"""A Python process that has registered this signal with `faulthandler` prints its stacks and goes on. A sidecar with
`PYTHONFAULTHANDLER` does. No other process receives it, and none receives a signal that would end it."""
_POLL_SECONDS = 0.05
_LINES_SHOWN = 20
_CHARACTERS_SHOWN = 20_000
_QUIET_SECONDS = 1.0
_MOST_SECONDS = 30.0

_sidecars: "weakref.WeakSet[Sidecar]"


class Stalled(RuntimeError):
    """A wait has failed. The message names the wait, and contains the last observed values and the stacks of all
    processes."""


class Patience:
    """The limit of one wait.

        patience = Patience("the reader job")
        while process.poll() is None:
            patience.check(rows_in_the_table(), log.stat().st_size)
            time.sleep(0.01)

    If a wait has nothing to observe, only the last resort limits the wait.
    """

    def __init__(self, what: str, last_resort_seconds: float = LAST_RESORT_SECONDS) -> None:
        self._what = what
        self._last_resort_seconds = last_resort_seconds
        self._began = self._changed_at = time.monotonic()
        self._seen: tuple[object, ...] = ()

    def check(self, *seen: object) -> None:
        """Raise Stalled if these values have not changed for STALL_SECONDS, or the wait has reached its last resort."""
        now = time.monotonic()
        if seen != self._seen:
            self._seen, self._changed_at = seen, now
        if seen and now - self._changed_at > STALL_SECONDS:
            why = f"has shown nothing new for {STALL_SECONDS:g} s"
        elif now - self._began > self._last_resort_seconds:
            why = f"has not ended after {self._last_resort_seconds:g} s"
        else:
            return
        last = f", seen last: {', '.join(map(str, seen))}" if seen else ""
        raise Stalled(f"{self._what} {why}{last}\n{all_stacks()}")

    def wait(self, process: "subprocess.Popen[Any]", seen: Callable[[], object] | None = None) -> int:
        """Wait until a process ends, and return its exit status. Raises Stalled as `check` does."""
        while True:
            try:
                return process.wait(_POLL_SECONDS)
            except subprocess.TimeoutExpired:
                self.check(*(() if seen is None else (seen(),)))

    def run(self, command: Sequence[str], **options: Any) -> "subprocess.CompletedProcess[str]":
        """Do the same as `subprocess.run`, with output as text. If the wait stalls, kill the process, and raise Stalled
        as `check` does."""
        with tempfile.TemporaryFile("w+") as printed, tempfile.TemporaryFile("w+") as errors:
            given: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": errors} | options
            with subprocess.Popen(command, **given) as process:
                try:
                    status = self.wait(process)
                finally:
                    process.kill()
            printed.seek(0)
            errors.seek(0)
            return subprocess.CompletedProcess(command, status, printed.read(), errors.read())


def all_stacks() -> str:
    """Return the stacks of this process's threads, of the tasks of its running event loop, and of its child processes.

    Java, and Python with a handler of STACKS_SIGNAL, print their stacks when asked. For other processes, return where
    each thread waits in the kernel. Works only on Linux. This call ends no process."""
    pids = _below(os.getpid())
    names = [f"{pid}: {' '.join(_command(pid))[:200]}" for pid in pids]
    said = [_own_stacks(), "\n".join(["The processes below it:", *names])]
    printed = {sidecar: len(sidecar.errors) for sidecar in _sidecars if sidecar.is_running}
    said += [f"The sidecar at {sidecar.address} printed last:\n{sidecar.last_lines()}" for sidecar in printed]
    with contextlib.ExitStack() as open_files:
        files, pipes = _outputs(pids)
        for file in files:
            open_files.enter_context(file)
        asked = [(pid, number) for pid in pids if (number := _ask(pid))]
        said += [_kernels_view(pid) for pid in pids if pid not in dict(asked)]
        _wait_until_quiet(
            lambda: (
                sum(_has_signal(pid, "ShdPnd", number) for pid, number in asked),
                [len(sidecar.errors) for sidecar in printed],
                [os.fstat(file.fileno()).st_size for file in files],
                [_unread_bytes(pipe) for pipe in pipes],
            )
        )
        for sidecar, begin in printed.items():
            said.append("\n".join(sidecar.errors[begin:]))
            # The stacks that were asked for are not errors of the sidecar.
            del sidecar.errors[begin:]
        said += [file.read()[-_CHARACTERS_SHOWN:].decode(errors="replace") for file in files]
        # Output that nobody has read by now is only meant for this reader.
        unread = [os.read(pipe, size) for pipe in pipes if (size := _unread_bytes(pipe))]
        said += [text[-_CHARACTERS_SHOWN:].decode(errors="replace") for text in unread]
    return "\n\n".join(text.strip() for text in said if text.strip())


def _own_stacks() -> str:
    with tempfile.TemporaryFile("w+", errors="replace") as file:
        # If there are many threads, not all are printed, and this one may be the last.
        faulthandler.dump_traceback(file, all_threads=False)
        faulthandler.dump_traceback(file)
        with contextlib.suppress(RuntimeError):  # no loop runs in this thread
            for task in asyncio.all_tasks(asyncio.get_running_loop()):
                print(f"\nTask {task.get_name()}, outermost call first:", *_awaits(task), sep="\n  ", file=file)
        file.seek(0)
        return file.read()


def _awaits(task: "asyncio.Task[Any]") -> Iterator[str]:
    coroutine: Any = task.get_coro()
    while (frame := getattr(coroutine, "cr_frame", None)) is not None:
        yield f'File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}'
        coroutine = coroutine.cr_await


def _below(pid: int) -> list[int]:
    """Return all processes that this process has started, directly or indirectly."""
    children: defaultdict[int, list[int]] = defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The text in brackets is a name, which may contain any character.
            children[int(path.read_text(errors="replace").rpartition(")")[2].split()[1])].append(int(path.parent.name))
    found = [pid]
    for parent in found:
        found += children[parent]
    return found[1:]


def _command(pid: int) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
    return ["(ended)"]


def _ask(pid: int) -> int:
    """If a process handles a signal by printing its stacks and continuing, send this signal. Return the signal, or
    0."""
    with contextlib.suppress(OSError):
        program = Path(f"/proc/{pid}/exe").readlink().name
        number = signal.SIGQUIT if program == "java" else STACKS_SIGNAL if "python" in program else 0
        if number and _has_signal(pid, "SigCgt", number):
            os.kill(pid, number)
            return number
    return 0


def _kernels_view(pid: int) -> str:
    """Return where each thread of a process waits in the kernel, if this user may see this."""
    lines = [f"Process {pid}, which prints no stacks, by the kernel:"]
    for thread in Path("/proc").glob(f"{pid}/task/*"):
        for name in ("comm", "wchan", "stack"):
            with contextlib.suppress(OSError):
                lines.append(f"{thread.name} {name}: {(thread / name).read_text(errors='replace').rstrip()}")
    return "\n".join(lines)


def _has_signal(pid: int, which: str, number: int) -> bool:
    """Return whether this signal is set in a field of the process's status: SigCgt (the process handles the signal) or
    ShdPnd (the signal is pending)."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        if found := re.search(rf"^{which}:\s*(\w+)", status, re.MULTILINE):
            return bool(int(found[1], 16) >> (number - 1) & 1)
    return False


def _outputs(pids: list[int]) -> tuple[list[BinaryIO], list[int]]:
    """Return the files to which these processes print, each opened at its end. Also return the pipes that this process
    reads."""
    ours: dict[tuple[int, int], int] = {}
    for fd in map(int, os.listdir("/proc/self/fd") if pids else []):
        with contextlib.suppress(OSError):
            if (
                stat.S_ISFIFO((found := os.fstat(fd)).st_mode)
                and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
            ):
                ours[found.st_dev, found.st_ino] = fd
    files: dict[tuple[int, int], BinaryIO] = {}
    pipes: dict[tuple[int, int], int] = {}
    for path in (f"/proc/{pid}/fd/{fd}" for pid in pids for fd in (1, 2)):
        with contextlib.suppress(OSError):
            key = (found := os.stat(path)).st_dev, found.st_ino
            if stat.S_ISREG(found.st_mode) and key not in files:
                files[key] = Path(path).open("rb")  # noqa: SIM115, the caller closes it
                files[key].seek(0, os.SEEK_END)
            elif key in ours:
                pipes[key] = ours[key]
    return list(files.values()), list(pipes.values())


def _unread_bytes(pipe: int) -> int:
    with contextlib.suppress(OSError):  # its reader has already closed it
        return int.from_bytes(fcntl.ioctl(pipe, termios.FIONREAD, b"\0" * 4), sys.byteorder)
    return 0


def _wait_until_quiet(look: Callable[[], tuple[object, ...]]) -> None:
    """Wait until the values of `look` no longer change, and the first value shows no pending signal."""
    ends = time.monotonic() + _MOST_SECONDS
    before: tuple[object, ...] = ()
    while ((now := look()) != before or now[0]) and time.monotonic() < ends:
        before = now
        time.sleep(_QUIET_SECONDS)


def reserved_port() -> socket.socket:
    """Return a socket bound to a free port of 127.0.0.1. While the socket is open, the system assigns the port to no
    other process.

    Only a server that requests this port, and sets the option to reuse addresses, can listen on the port.
    """
    reserving = socket.socket()
    reserving.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserving.bind(("127.0.0.1", 0))
    return reserving


class Sidecar:
    """A sidecar process, on a free port of 127.0.0.1. After a restart the port is the same.

        with Sidecar(allow_auto_topic_creation=False) as sidecar:
            ...  # publish to sidecar.address
            sidecar.kill()  # -9
            sidecar.start()

    The data directory is made in `folder`, and is not removed. Without `folder`, the data directory is temporary, and
    is removed after the block. `keys` are keys of the configuration (docs/reference/configuration.md). `environment` is
    added to this process's environment. `module` is the module that `python -m` runs. Keys may be changed between two
    starts. Needs the extra `seqdedupe[sidecar]`. The sidecar uses no authentication, so clients need no token, unless
    `keys` has `authentication="token"`. Several `workers` listen on Unix sockets, and `address` contains all sockets,
    separated by commas. The methods block, and must be called from one thread.
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
        # While the sidecar is down, no other process may get its port.
        weakref.finalize(self, reserving.close)
        self.address = "{}:{}".format(*reserving.getsockname())
        """`host:port` or `unix:path`. With a `listen` among the keys, it is known once the sidecar serves."""
        self._has_workers = workers > 1
        if self._has_workers:
            # A path below `folder` may be too long for a socket.
            sockets = tempfile.mkdtemp(prefix="seqdedupe-")
            weakref.finalize(self, shutil.rmtree, sockets)
            listen = f"unix:{sockets}/worker"
            self.address = ",".join(f"{listen}.{worker}" for worker in range(workers))
            self.keys = {"workers": workers, "listen": listen} | keys
        self.worker_pids: dict[int, int] = {}
        """The process IDs of workers that run now, by their numbers from 0 on."""
        self._serving_at: set[str] = set()
        self.log: list[dict[str, Any]] = []
        """The log since the first start, as parsed JSON lines: `event`, `level`, ..."""
        self.errors: list[str] = []
        """All other output on standard error, by lines."""
        self._process: subprocess.Popen[str] | None = None
        self._serving = threading.Event()
        self._reader: threading.Thread | None = None
        _sidecars.add(self)

    @property
    def data(self) -> Path:
        """The sidecar's data directory, unless `keys` has another one."""
        return self.folder / "data"

    @property
    def token_file(self) -> Path:
        """With `authentication="token"`: the file with the token, once the sidecar serves."""
        return self.data / "token"

    @property
    def pid(self) -> int:
        """The process ID. Raises RuntimeError before the first start."""
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
        """Do `spawn` and `wait_until_serving`. Raises RuntimeError if it runs already."""
        self.spawn()
        self.wait_until_serving()

    def spawn(self) -> "subprocess.Popen[str]":
        """Start the process without waiting until the sidecar serves. Raises RuntimeError if the process already
        runs."""
        if self.is_running:
            raise RuntimeError(f"the sidecar runs already, as process {self.pid}: kill or stop it first")
        self.folder.mkdir(parents=True, exist_ok=True)
        self._serving.clear()
        self._serving_at.clear()
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", self._module, *self._flags()],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"} | self._environment,
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

    def wait_until_serving(self) -> None:
        """Wait until the sidecar serves. If the process ends instead, raise RuntimeError with its output. Also raises
        Stalled."""
        # The first start on a machine compiles, and prints nothing for a minute or several.
        patience = Patience("the start of the sidecar", LAST_RESORT_SECONDS * (self.address.count(",") + 1))
        while not self._serving.wait(_POLL_SECONDS):
            self.check_running()
            patience.check()

    def check_running(self) -> None:
        """If the process has ended without being stopped, raise RuntimeError with the end of the process's output."""
        process = self._process
        if process is not None and process.poll() is not None:
            self._join()
            raise RuntimeError(f"the sidecar ended with {process.returncode}: {self.last_lines()}")

    def last_lines(self) -> str:
        """Return the last lines that it has logged and printed."""
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
        """Kill it with kill -9."""
        self.signal(signal.SIGKILL)
        if self._process is not None:
            Patience("the end of the sidecar that was killed").wait(self._process)
        for pid in self.worker_pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.worker_pids.clear()
        self.wait()

    def stop(self) -> int:
        """Send SIGTERM: it drains. Return the exit status."""
        self.signal(signal.SIGTERM)
        return self.wait()

    def restart(self) -> None:
        """Kill it with kill -9, and start it again."""
        self.kill()
        self.start()

    def close(self) -> None:
        """Kill it with kill -9, and remove a temporary folder."""
        self.kill()
        if self._temporary is not None:
            self._temporary.cleanup()

    def signal(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        if self._process is not None and self.is_running:
            self._process.send_signal(number)

    def wait(self) -> int:
        """Wait for the process to end, and return the exit status. Raises Stalled."""
        if self._process is None:
            return 0
        status = Patience("the end of the sidecar").wait(self._process, lambda: len(self.log) + len(self.errors))
        self._join()
        return status


_sidecars = weakref.WeakSet()
