"""A standalone Pulsar as a process: several may run side by side, and can be killed, frozen and started again."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Mapping
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

from pulsar_broker import quick
from pulsar_broker.distribution import Unavailable
from seqdedupe.testing import Patience, reserved_port

WORKER = "functions_worker.yml"
WORKER_HTTP_THREADS = 16
"""A functions worker calls its own broker while it answers a call."""
_HEALTH_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.05
_CHARACTERS_SHOWN = 400

_KEYS = {
    "clusterName": "standalone",
    "bindAddress": "127.0.0.1",
    "advertisedAddress": "127.0.0.1",
    "managedLedgerDefaultEnsembleSize": 1,
    "managedLedgerDefaultWriteQuorum": 1,
    "managedLedgerDefaultAckQuorum": 1,
    "brokerDeleteInactiveTopicsEnabled": "false",
    "loadBalancerEnabled": "false",
    "numIOThreads": 2,
    "numHttpServerThreads": 4,
    "ledgerStorageClass": "org.apache.bookkeeper.bookie.storage.ldb.DbLedgerStorage",
    "journalMaxGroupWaitMSec": 1,
    "journalSyncData": "false",
    "allowLoopback": "true",
    # Without it an entry of 5 MB makes the broker open ledger after ledger, and log 1 GB a minute.
    "nettyMaxFrameSizeBytes": 5253120,
    "diskUsageThreshold": 0.99,
    "diskUsageWarnThreshold": 0.98,
    # Otherwise the bookie is out for a while after a kill -9.
    "bookkeeperClientHealthCheckEnabled": "false",
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def configuration(port: int, admin_port: int, more: Mapping[str, object]) -> str:
    """Return a `standalone.conf`: a broker and a bookie. Data survive kill -9, and with `journalSyncData` a power
    cut."""
    keys = _KEYS | {"brokerServicePort": port, "webServicePort": admin_port} | dict(more)
    return "".join(f"{key}={value}\n" for key, value in keys.items())


def command(home: Path, folder: Path, *, with_functions: bool = False) -> list[str]:
    """Return the command that starts it, with its data below this folder. The script becomes the JVM: its process is
    the broker's."""
    # Without this, a broker would stay for ever after the end of the process that started it.
    with_parent = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    data = ["--metadata-dir", str(folder / "metadata"), "--bookkeeper-dir", str(folder / "bookkeeper")]
    functions = ["--functions-worker-conf", str(folder / WORKER)] if with_functions else ["-nfw"]
    start = ["bash", str(home / "bin" / "pulsar"), "standalone", *functions, "-nss", "-a", "127.0.0.1"]
    return [*with_parent, *start, *data]


def worker_configuration(home: Path, folder: Path) -> str:
    """Return a `functions_worker.yml`: the distribution's, except that an ended instance is started again at once."""
    keys = {
        "instanceLivenessCheckFreqMs": "2000",
        "downloadDirectory": str(folder / "functions"),
        "    logDirectory": str(folder / "logs"),
    }
    text = (home / "conf" / WORKER).read_text()
    for key, value in keys.items():
        text = re.sub(f"^{key}:.*$", f"{key}: {value}", text, flags=re.MULTILINE)
    return text


def environment(folder: Path) -> dict[str, str]:
    """Return the additions to the process's environment, with which it writes nothing outside its folder."""
    return {
        "PULSAR_STANDALONE_CONF": str(folder / "standalone.conf"),
        "PULSAR_LOG_DIR": str(folder / "logs"),
        "PULSAR_MEM": "-Xms256m -Xmx1g -XX:MaxDirectMemorySize=512m",
        "PULSAR_GC": "-XX:+UseSerialGC",
        "PULSAR_GC_LOG": "-Xlog:disable",
        "PULSAR_LOG_APPENDER": "Console",
        "PULSAR_LOG_LEVEL": "warn",
        "PULSAR_LOG_ROOT_LEVEL": "warn",
    }


def is_healthy(admin_url: str, token: str = "") -> bool:
    """Whether it serves: the default namespace is made, and the broker reports that it can write and read."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    if token:
        direct.addheaders = [("Authorization", f"Bearer {token}")]
    try:
        with direct.open(f"{admin_url}/admin/v2/namespaces/public", timeout=_HEALTH_TIMEOUT_SECONDS) as answer:
            if "public/default" not in json.load(answer):
                return False
        with direct.open(f"{admin_url}/admin/v2/brokers/health", timeout=_HEALTH_TIMEOUT_SECONDS) as answer:
            return bool(answer.read() == b"ok")
    except (OSError, HTTPException, ValueError):
        return False


class Broker:
    """A standalone broker on free ports of 127.0.0.1, which stay the same over restarts.

        with Broker(home(), keepAliveIntervalSeconds=5) as broker:
            ...  # pulsar.Client(broker.service_url)
            broker.kill()  # -9
            broker.start()  # with the same data

    Its data and its logs are in a temporary folder that is removed with the block. `keys` are those of Pulsar's
    `standalone.conf`; `token` is the token for calls if these require one. `with_functions` adds a functions worker,
    whose instances run in the first `python3` of the PATH. Starting takes about five seconds, and a broker 0.4 to 0.7
    GB of memory. Its methods block.
    """

    environment: Mapping[str, str] | None = None
    """The environment of its process, in addition to the variables that keep it in its folder. None: the environment of
    a quick start, for users who do not measure."""

    def __init__(self, home: Path, token: str = "", /, *, with_functions: bool = False, **keys: Any) -> None:
        self._token = token
        self._folder = Path(tempfile.mkdtemp(prefix="seqdedupe-pulsar-"))
        self._home = home
        self._command = command(home, self._folder, with_functions=with_functions)
        if with_functions:
            packages = self._folder / "packages"
            keys = {"numHttpServerThreads": WORKER_HTTP_THREADS, "STORAGE_PATH": packages} | keys
            (self._folder / WORKER).write_text(worker_configuration(home, self._folder))
        self._process: subprocess.Popen[bytes] | None = None
        # While the broker is down no other process may get its ports.
        self._reserving = reserved_port(), reserved_port()
        port, admin_port = (reserving.getsockname()[1] for reserving in self._reserving)
        self.service_url = f"pulsar://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        (self._folder / "standalone.conf").write_text(configuration(port, admin_port, keys))

    @property
    def sidecar_keys(self) -> dict[str, Any]:
        """The configuration of a sidecar that keeps its topics there."""
        return {
            "log": "pulsar",
            "pulsar_service_url": self.service_url,
            "pulsar_admin_url": self.admin_url,
            "pulsar_manage_topic_policies": True,
        }

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start it, and return when it is healthy. Raises Unavailable if it ends instead, and Stalled."""
        self.spawn()
        self.wait_until_healthy()

    def spawn(self) -> None:
        """Run the first half of `start`. The process ends with the thread that calls this."""
        more = quick.environment(self._home) if self.environment is None else self.environment
        with (self._folder / "printed").open("ab") as printed:
            self._process = subprocess.Popen(
                self._command,
                env=os.environ | environment(self._folder) | dict(more),
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the process that started it
            )

    def wait_until_healthy(self) -> None:
        """Run the second half of `start`, which may wait in any thread."""
        patience = Patience("the start of the broker")
        while not is_healthy(self.admin_url, self._token):
            self.check_running()
            patience.check()
            time.sleep(_POLL_SECONDS)

    def check_running(self) -> None:
        """Raise Unavailable, with the end of its output, if it has ended without a request."""
        if self._process is not None and self._process.poll() is not None:
            raise Unavailable(f"the broker ended with {self._process.returncode}: {self._printed()}")

    def _printed(self) -> str:
        return (self._folder / "printed").read_text(errors="replace").strip()[-_CHARACTERS_SHOWN:]

    def kill(self) -> None:
        """Kill it with -9."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        """End it with SIGTERM: it closes its ledgers."""
        self._end(signal.SIGTERM)

    def freeze(self) -> None:
        """Freeze it with SIGSTOP: its connections stay, and nothing is answered until `thaw`."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continue it with SIGCONT."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill it with -9, and remove its data."""
        self.kill()
        for reserving in self._reserving:
            reserving.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _signal(self, number: int) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _end(self, number: int) -> None:
        if self._process is not None:
            self._signal(number)
            Patience("the end of the broker").wait(self._process)
