"""An instance of Pulsar's own Python runtime as a process, as the functions worker starts it; killed and restarted."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pulsar_broker.standalone import free_port

FULL_NAME = "seqdedupe.functions.DedupeFunction"


def details(name: str, inputs: str, *, class_name: str, output: str = "", **changes: Any) -> dict[str, Any]:
    """Return Pulsar's `FunctionDetails` as JSON, as a wrapped function needs them."""
    return {
        "tenant": "public",
        "namespace": "default",
        "name": name,
        "className": class_name,
        "runtime": "PYTHON",
        "processingGuarantees": "MANUAL",
        "retainOrdering": True,
        "parallelism": 1,
        "source": {
            "subscriptionType": "FAILOVER",
            "subscriptionPosition": "EARLIEST",
            "inputSpecs": {inputs: {"receiverQueueSize": {"value": 1000}}},
        },
        "sink": {"topic": output},
    } | changes


class Instance:
    """Runs `code`, a wheel or a module. When it ends it is started again, as by the worker."""

    def __init__(
        self, home: Path, folder: Path, service_url: str, code: Path, function: dict[str, Any], number: int = 0
    ) -> None:
        self._folder = folder / f"instance-{number}"
        self._folder.mkdir()
        python = home / "instances" / "python-instance"
        here = self._folder / code.name
        here.write_bytes(code.read_bytes())
        self._command = [
            sys.executable,
            str(python / "python_instance_main.py"),
            *("--function_details", json.dumps(function)),
            *("--py", str(here)),
            *("--instance_id", str(number)),
            *("--function_id", function["name"]),
            *("--function_version", "1"),
            *("--pulsar_serviceurl", service_url),
            *("--max_buffered_tuples", "1024"),
            *("--logging_directory", str(self._folder)),
            *("--logging_file", function["name"]),
            *("--logging_level", "info"),
            *("--logging_config_file", str(home / "conf" / "functions-logging" / "console_logging_config.ini")),
            *("--expected_healthcheck_interval", "-1"),
            *("--cluster_name", "standalone"),
        ]
        self._lock = threading.Lock()
        self._is_over = False
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._log = (self._folder / "log").open("ab")
        self._keeper = threading.Thread(target=self._keep, daemon=True)

    def __enter__(self) -> Self:
        self._keeper.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._is_over = True
        self.kill()
        self._keeper.join()
        self._log.close()

    def _keep(self) -> None:
        while True:
            with self._lock:
                if self._is_over:
                    return
                ports = ["--port", str(free_port()), "--metrics_port", str(free_port())]
                self._process = subprocess.Popen(
                    [*self._command, *ports],
                    stdout=self._log,
                    stderr=self._log,
                    env=os.environ | {"PYTHONUNBUFFERED": "1"},
                )
                self.starts += 1
            self._process.wait()

    def kill(self) -> None:
        """Kill it with -9. It is started again."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def terminate(self) -> None:
        """End it as the worker does."""
        if self._process is not None:
            self._process.terminate()

    @property
    def log(self) -> str:
        """The output of the process."""
        return (self._folder / "log").read_text(errors="replace")
