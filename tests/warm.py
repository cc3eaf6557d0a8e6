"""Sidecars and commands that begin with everything imported: forked from a process that did it once.

Imports and compiled kernels are a second of CPU for a sidecar and a third for a command, and the tests start a
thousand of them. What is forked is otherwise a process as any: with its own memory, descriptors, working directory and
arguments, a child of the tests' process, to be killed at will. What is started with a changed environment (but for
`SEQDEDUPE_…`, which is read late), or in any unusual way, starts cold, and so does everything within `cold`.
"""

import atexit
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from broker_sidecar import kernels
from seqdedupe.testing import STACKS_SIGNAL

ROOT = Path(__file__).parents[1]
COMMAND = str(Path(sys.executable).with_name("seqdedupe"))
SIDECAR = [sys.executable, "-m", "broker_sidecar"]
MODULES = {
    "broker_sidecar": "sidecar",
    "tests.broker_sidecar.dying_moving": "dying",
    "tests.broker_sidecar.small_windows": "windows",
}
"""What `python -m` starts warm."""
MAINS = {
    "command": "seqdedupe.cli.main",
    "sidecar": "broker_sidecar.__main__",
    "dying": "tests.broker_sidecar.dying_moving",
    "windows": "tests.broker_sidecar.small_windows",
}
"""What can start warm: the modules of their functions `main`."""

# gRPC's own are what a start of sidecar or command says: any process that has imported their modules has them.
_READ_LATE = (
    "SEQDEDUPE_",
    "NOTIFY_SOCKET",
    "WATCHDOG_",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "PYTEST_CURRENT_TEST",
    "GRPC_",
)
_SPARKS = ("SPARK_", "PYSPARK_", "AWS_")
"""What a session in the tests' process leaves in its environment, beside folders of this repository in PYTHONPATH."""
_MAX_REQUEST_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
_INHERITED = -1
_usual_popen = subprocess.Popen


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, which forks what it can from the warm process."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, pass_fds, cwd, env, _, _, shell, *pipes, _, gid, gids, uid, umask, new_session, group = rest
        unusual = (executable, preexec_fn, pass_fds, shell, gid, gids, uid, umask + 1, new_session, group + 1)
        command = None if any(unusual) or isinstance(args, str | bytes | os.PathLike) else _warm_command(args)
        if command is None or not _server.fits(environment := dict(os.environ if env is None else env)):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        sys.audit("subprocess.Popen", executable, args, cwd, env)
        streams = [own if fd == _INHERITED else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        try:
            self.pid = _server.fork(command, os.fspath(cwd or os.getcwd()), environment, streams)
        finally:
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self._child_created = True


def install() -> None:
    """From now on this process starts warm what it can."""
    subprocess.Popen = Popen  # type: ignore[misc]


@contextmanager
def cold() -> Iterator[None]:
    """Within it everything starts as a user's does."""
    warm, subprocess.Popen = subprocess.Popen, _usual_popen  # type: ignore[misc]
    try:
        yield
    finally:
        subprocess.Popen = warm  # type: ignore[misc]


def _warm_command(args: Sequence[Any]) -> list[str] | None:
    words = [os.fspath(arg) for arg in args]
    if words[:1] == [COMMAND]:
        return ["command", *words[1:]]
    if words[:2] == [sys.executable, "-m"] and (what := MODULES.get(words[2])):
        return [what, *words[3:]]
    return None


class _Server:
    """The tests' side of the warm process, which is started when it is first needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._environment = _early(os.environ)

    def fits(self, environment: dict[str, str]) -> bool:
        """Whether what was imported there is what would be imported in this environment."""
        with self._lock:
            if self._socket is None:
                self._start()
            return _early(environment) == self._environment

    def _start(self) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.warm"]
            process = _usual_popen(command, stdin=theirs.fileno(), cwd=ROOT, env=self._environment)
        atexit.register(process.wait)
        atexit.register(self._socket.close)

    def fork(self, command: Sequence[str], cwd: str, environment: dict[str, str], streams: list[int]) -> int:
        """The number of a new process, which is a child of this one."""
        request = json.dumps([command, cwd, environment]).encode(errors="surrogateescape")
        with self._lock, _adopting():
            if self._socket is None:
                raise RuntimeError("the warm process was not started")
            socket.send_fds(self._socket, [request], streams)
            return int(self._socket.recv(_MAX_REQUEST_BYTES))


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    early = {name: value for name, value in environment.items() if not name.startswith(_READ_LATE + _SPARKS)}
    places = early.pop("PYTHONPATH", "").split(os.pathsep)
    elsewhere = [place for place in places if place and not Path(place).is_relative_to(ROOT)]
    return early | ({"PYTHONPATH": os.pathsep.join(elsewhere)} if elsewhere else {})


@contextmanager
def _adopting() -> Iterator[None]:
    """Within it a process whose parent ends becomes a child of this one."""
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_server = _Server()


def _serve(requests: socket.socket) -> Sequence[str]:
    """Forks for each request, and returns in what was forked: what it is to run."""
    while True:
        request, streams, _, _ = socket.recv_fds(requests, _MAX_REQUEST_BYTES, 3)
        if not request:
            os._exit(0)
        reads, writes = os.pipe()
        if not (between := os.fork()):
            # Its own end makes the tests' process the parent.
            if number := os.fork():
                os.write(writes, b"%d" % number)
                os._exit(0)
            requests.close()
            os.close(reads)
            os.close(writes)
            return _become(json.loads(request), streams)
        os.waitpid(between, 0)
        requests.send(os.read(reads, _MAX_REQUEST_BYTES))
        for fd in (reads, writes, *streams):
            os.close(fd)


def _become(request: Any, streams: list[int]) -> Sequence[str]:
    command, cwd, environment = request
    for own, theirs in enumerate(streams):
        os.dup2(theirs, own)
        os.close(theirs)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    words: list[str] = command
    return words


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # All that is forked from here has both: who hangs says where.
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL)
    kernels.prepare()
    # The sidecar's first: it has a word with gRPC before that is imported.
    for name in (MAINS["sidecar"], "broker_sidecar.server", "seqdedupe.cli.commands", MAINS["command"]):
        importlib.import_module(name)
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    gc.freeze()
    what, *sys.argv[1:] = _serve(requests)
    sys.argv[0] = what
    sys.exit(importlib.import_module(MAINS[what]).main())


if __name__ == "__main__":
    _main()
