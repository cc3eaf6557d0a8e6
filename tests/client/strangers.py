"""Processes of another user of this machine, who listens where a sidecar should. Only root can start them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

USER = 54_321
"""Nobody's."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs another user's process")

_LISTENS = """
import os, socket, sys
host, port, v6_only = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.setgid({user}); os.setuid({user})
listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
if ":" in host:
    listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, v6_only)
listening.bind((host, port))
listening.listen()
print(listening.getsockname()[1], flush=True)
sys.stdin.readline()
connection, _ = listening.accept()
listening.close()
print("accepted", flush=True)
sys.stdin.readline()
"""

_SERVES = """
import os, sys
from concurrent.futures import ThreadPoolExecutor
import grpc

class Anything(grpc.GenericRpcHandler):
    def service(self, details):
        shown = dict(details.invocation_metadata).get("authorization", "nothing")
        print(details.method.rpartition("/")[2], shown, flush=True)

os.setgid({user}); os.setuid({user})
server = grpc.server(ThreadPoolExecutor(4), [Anything()], options=[("grpc.so_reuseport", 0)])
print(server.add_insecure_port("127.0.0.1:" + sys.argv[1]), flush=True)
server.start()
sys.stdin.readline()
"""


class Stranger:
    """Another user's process."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin: IO[str] = process.stdin
        self._stdout: IO[str] = process.stdout
        self.port = int(self._stdout.readline())

    def go_on(self) -> str:
        """It does the next thing, and says so."""
        self._stdin.write("\n")
        self._stdin.flush()
        return self.said()

    def said(self) -> str:
        """The next line that it writes."""
        return self._stdout.readline().strip()


@contextmanager
def listening(host: str, port: int = 0, *, v6_only: bool = False) -> Iterator[Stranger]:
    """A stranger that listens. When it goes on, it accepts a connection, and listens no more."""
    with _running(_LISTENS, host, str(port), str(int(v6_only))) as stranger:
        yield stranger


@contextmanager
def serving(port: int = 0) -> Iterator[Stranger]:
    """A stranger that serves gRPC, as much as it takes to be shown tokens. It says what each call shows."""
    with _running(_SERVES, str(port)) as stranger:
        yield stranger


@contextmanager
def _running(script: str, *arguments: str) -> Iterator[Stranger]:
    command = [sys.executable, "-c", script.format(user=USER), *arguments]
    with subprocess.Popen(command, cwd=Path("/"), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Stranger(process)
        finally:
            process.kill()
