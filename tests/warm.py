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
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from broker_sidecar import kernels
from seqdedupe.testing import STACKS_SIGNAL

ROOT = Path(__file__).parents[1]
COMMAND = str(Path(sys.executable).with_name("seqdedupe"))
PYTHON = sys.executable
SIDECAR = [PYTHON, "-m", "broker_sidecar"]
PACKAGES = "broker_sidecar.", "tests.", "examples."
"""What `python -m` starts warm. Tests' modules replace nothing that others have imported by name."""
MAY_BE_WARM = "# may start warm\n"
"""What `python -c` starts warm begins with this line."""
_MAIN = "broker_sidecar.__main__"

# gRPC's own are what a start of sidecar or command says: any process that has imported their modules has them.
_READ_LATE = (
    "SEQDEDUPE_",
    "NOTIFY_SOCKET",
    "WATCHDOG_",
    "PYTHONUNBUFFERED",
    "PYTHONFAULTHANDLER",
    "PYTEST_CURRENT_TEST",
    "GRPC_",
    "OTEL_",
    "HOME",
    "PATH",
    # Those of sidecars with planted bugs and other constants, in `tests.broker_sidecar`.
    "BACKUP_BUG",
    "DIES_AT_FILE",
    "EDGE_SIDECAR",
    "PAUSES_IN",
    "SEVERAL_STEPS",
    "WITH_",
)
_SPARKS = ("SPARK_", "PYSPARK_", "AWS_")
"""What a session in the tests' process leaves in its environment, except folders of this repository in PYTHONPATH."""
_MAX_REQUEST_BYTES = 1 << 20
_PR_SET_CHILD_SUBREAPER = 36
_INHERITED = -1
_usual_popen = subprocess.Popen


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, which forks what it can from the warm process."""

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        _, pass_fds, cwd, env, _, _, shell, *pipes, _, gid, gids, uid, umask, new_session, group = rest
        first = _first_call(preexec_fn)
        unusual = (executable, preexec_fn and not first, pass_fds, shell, gid, gids, uid, umask + 1, new_session)
        is_usual = not any(unusual) and group == -1 and not isinstance(args, str | bytes | os.PathLike)
        command = _warm_command(args) if is_usual else None
        if command is None or not _server.fits(environment := dict(os.environ if env is None else env)):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        sys.audit("subprocess.Popen", executable, args, cwd, env)
        streams = [own if fd == _INHERITED else fd for own, fd in enumerate((pipes[0], pipes[3], pipes[5]))]
        try:
            self.pid = _server.fork(command, os.fspath(cwd or os.getcwd()), environment, first, streams)
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
    match words:
        case [program, "-m", module, *_] if program == PYTHON and f"{module}.".startswith(PACKAGES):
            return words[1:]
        case [program, "-c", code, *_] if program == PYTHON and code.startswith(MAY_BE_WARM):
            return words[1:]
    return None


def _first_call(preexec_fn: Any) -> Sequence[Any]:
    """The name of a module's function and its arguments, if this is what a process begins with."""
    function = getattr(preexec_fn, "func", None)
    name = getattr(function, "__qualname__", ".")
    return () if "." in name or preexec_fn.keywords else (function.__module__, name, *preexec_fn.args)


class _Server:
    """The side of who starts something from the warm process, which is started when it is first needed."""

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
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.warm"]
            try:
                process = _usual_popen(command, stdin=theirs.fileno(), cwd=ROOT, env=self._environment)
            except BaseException:
                # A unit test may start nothing. The next test that may tries again.
                ours.close()
                raise
        self._socket = ours
        atexit.register(process.wait)
        atexit.register(ours.close)

    def use(self, requests: socket.socket) -> None:
        """What is forked there is started from now on."""
        self._socket, self._environment = requests, _early(os.environ)

    def fork(
        self, command: Sequence[str], cwd: str, environment: dict[str, str], first: Sequence[Any], streams: list[int]
    ) -> int:
        """The number of a new process, which is a child of this one."""
        request = json.dumps([command, cwd, environment, first]).encode(errors="surrogateescape")
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
            # Its own end makes the one that has asked the parent.
            between = os.getpid()
            if number := os.fork():
                os.write(writes, b"%d" % number)
                os._exit(0)
            requests.close()
            os.close(reads)
            os.close(writes)
            return _become(json.loads(request), streams, between)
        os.waitpid(between, 0)
        requests.send(os.read(reads, _MAX_REQUEST_BYTES))
        for fd in (reads, writes, *streams):
            os.close(fd)


def _become(request: Any, streams: list[int], between: int) -> Sequence[str]:
    command, cwd, environment, first = request
    for own, theirs in enumerate(streams):
        os.dup2(theirs, own)
        os.close(theirs)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if first:
        module, name, *arguments = first
        while os.getppid() == between:
            time.sleep(0.001)
        getattr(importlib.import_module(module), name)(*arguments)
    words: list[str] = command
    return words


def _start_warm_too(words: Sequence[str]) -> Sequence[str]:
    """From now on this process starts its workers warm: from a fork of it as it is now. Returns in what was forked
    there what it is to run, and here what is run."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if not os.fork():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        ours.close()
        return _serve(theirs)
    theirs.close()
    _server.use(ours)
    install()
    return words


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # All that is forked from here has both: who hangs says where.
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL)
    kernels.prepare()
    # The sidecar's first: it has a word with gRPC before that is imported.
    for name in (_MAIN, "broker_sidecar.server", "seqdedupe.cli.commands", "seqdedupe.cli.main"):
        importlib.import_module(name)
    del sys.modules[_MAIN]  # it will be run
    requests = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    gc.freeze()
    command = _serve(requests)
    what, *words = _start_warm_too(command) if "--workers" in command else command
    if what == "command":
        sys.argv = [COMMAND, *words]
        sys.exit(importlib.import_module("seqdedupe.cli.main").main())
    sys.argv = words
    if what == "-m":
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        code, sys.argv[0], sys.path[0] = words[0], "-c", ""
        sys.modules["__main__"] = program = ModuleType("__main__")
        exec(compile(code, "<string>", "exec"), vars(program))


if __name__ == "__main__":
    _main()
