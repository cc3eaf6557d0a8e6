"""The Python processes of a test session of Spark begin with everything imported: forked from one that did it once.

A streaming query starts ten of them, and imports are most of their CPU. Spark starts `launcher` as its Python, which
passes arguments, folder, environment and streams to the process that forks, and ends when what was forked ends, or ends
it. The session of the fixture `spark` and the server of Spark Connect have this. Other sessions, and all that are
killed, start Python as a user's does.
"""

import faulthandler
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from seqdedupe.testing import STACKS_SIGNAL
from tests import warm

MODULES = ("pyspark.worker", "pyspark_seqdedupe", "tests.spark.killing", "tests.spark.run_sink")
"""What workers import, and all of `pyspark.sql.worker`."""
MAX_REQUEST_BYTES = 1 << 17
REPOSITORY = Path(__file__).parents[2]

LAUNCHER = f"""\
#!{sys.executable} -IS
import json, os, socket, sys

words = sys.argv[1:]
if words[0] != "-m":
    os.execv(sys.executable, [sys.executable, *words])
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect(os.path.join(os.path.dirname(sys.argv[0]), "socket"))
    request = json.dumps([words[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [request], [0, 1, 2])
    sys.exit(int(server.recv(16) or b"1"))
"""


@contextmanager
def launcher(folder: Path, path: str) -> Iterator[Path]:
    """The program that Spark is to start as its Python, with this PYTHONPATH. The folder is for it alone."""
    program = folder / "python"
    program.write_text(LAUNCHER)
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(64)
        command = [sys.executable, "-m", "tests.spark.workers"]
        environment = os.environ | {"PYTHONPATH": path}
        with warm.cold():
            process = subprocess.Popen(command, stdin=listener.fileno(), cwd=REPOSITORY, env=environment)
    try:
        yield program
    finally:
        process.kill()
        process.wait()


def _serve(listener: socket.socket) -> Any:
    """Forks for each request, and returns in what was forked: the request."""
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        if not select.select([listener], [], [], 1)[0]:
            if os.getppid() != parent:
                os._exit(0)
            continue
        launched = listener.accept()[0]
        if not os.fork():
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            request, streams, _, _ = socket.recv_fds(launched, MAX_REQUEST_BYTES, 3)
            if not (forked := os.fork()):
                launched.close()
                for own, theirs in enumerate(streams):
                    os.dup2(theirs, own)
                    os.close(theirs)
                return json.loads(request)
            _watch(launched, forked, streams)
        launched.close()


def _watch(launched: socket.socket, forked: int, streams: list[int]) -> None:
    """Until what was forked ends, which it is asked to when its launcher is gone."""
    for fd in (0, 1, 2, *streams):
        os.close(fd)
    ended = os.pidfd_open(forked)
    if ended not in select.select([launched.fileno(), ended], [], [])[0]:
        os.kill(forked, signal.SIGTERM)
    status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
    with suppress(OSError):
        launched.send(b"%d" % (status % 256))
    os._exit(0)


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    faulthandler.enable()
    faulthandler.register(STACKS_SIGNAL)
    listener = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for name in MODULES:
        importlib.import_module(name)
    import pyspark.sql.worker

    for module in pkgutil.iter_modules(pyspark.sql.worker.__path__, "pyspark.sql.worker."):
        importlib.import_module(module.name)
    gc.freeze()
    words, cwd, environment = _serve(listener)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    places = [place for place in environment.get("PYTHONPATH", "").split(os.pathsep) if not place.endswith(".zip")]
    sys.path[:] = [cwd, *places, *sys.path]
    sys.argv[:] = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
