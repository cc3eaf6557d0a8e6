"""The tests of Pulsar's Go client, with the door of a sidecar between the client and a real broker.

    python -m tests.pulsar.peer_suite                   all tests through the door
    python -m tests.pulsar.peer_suite TestReader        these tests through the door
    python -m tests.pulsar.peer_suite --broker          all tests directly at the broker, to compare

The client and its tests come from the proxy for Go modules, once. In a copy, the tests' fixed URLs are those of this
run: `pulsar://localhost:6650` is the door's, and `http://localhost:8080` the broker's, since the door has no REST.
Nothing else is changed. The door passes consumers on to the broker (`pulsar.serve_consumers`).
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pulsar_broker.distribution import FOLDER, Unavailable, get
from pulsar_broker.standalone import Broker
from seqdedupe.exposition import FRESH_SECONDS
from seqdedupe.testing import Patience, Sidecar
from tests.broker_sidecar.door.wire import door_of
from tests.broker_sidecar.metrics.scraping import scrape

MODULE, VERSION = "github.com/apache/pulsar-client-go", "v0.19.0"
FILES = ("producer_test.go", "reader_test.go", "schema_test.go")
NAMESPACE = "public/default"
TEST_SECONDS = 60
"""The limit of a test, by `go test`: a test that waits for a message that does not come would wait for ever."""

BROKER_KEYS: dict[str, Any] = {"maxMessageSize": 1024 * 1024, "backlogQuotaCheckIntervalInSeconds": 5}
"""What the suite expects of its broker, as its `integration-tests/conf/standalone.conf` says."""

_URLS = {'"pulsar://localhost:6650': 'peerServiceURL + "', '"http://localhost:8080': 'peerAdminURL + "'}

_URLS_FILE = """package pulsar

import "os"

var (
	peerServiceURL = os.Getenv("PEER_SERVICE_URL")
	peerAdminURL   = os.Getenv("PEER_ADMIN_URL")
)
"""


class Suite(NamedTuple):
    """The compiled tests."""

    program: Path
    folder: Path
    """The folder in which they run."""

    def tests(self, *files: str) -> list[str]:
        """The names of the tests in these files, in their order."""
        return [
            name
            for file in files
            for name in re.findall(r"^func (Test\w+)\(t ", (self.folder / file).read_text(), re.MULTILINE)
        ]


class Outcome(NamedTuple):
    """The outcome of a test."""

    result: str
    """`pass`, `fail`, or `skip`."""
    entries: int
    """The entries that the door has answered with receipts meanwhile."""
    producers: int
    """The producers that were opened at the door meanwhile."""
    output: str


def suite(folder: Path = FOLDER) -> Suite:
    """Return the compiled suite. The first call fetches it. Raises Unavailable if this machine cannot have it."""
    changes = hashlib.sha256(repr((_URLS, _URLS_FILE)).encode()).hexdigest()[:12]
    there = folder / f"pulsar-client-go-{VERSION}-{changes}"
    built = Suite(there / "suite.test", there / "pulsar")
    if not there.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Made next to its place and renamed, so a suite at its place is whole.
        with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished-") as unfinished:
            copy = Path(unfinished) / "suite"
            shutil.copytree(_fetched(unfinished), copy, copy_function=shutil.copyfile)
            for path in (copy, *copy.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            _change(copy / "pulsar")
            _go(copy, "test", "-c", "-o", "suite.test", "./pulsar")
            copy.rename(there)
    return built


def _fetched(folder: str) -> Path:
    printed = _go(Path(folder), "mod", "download", "-json", f"{MODULE}@{VERSION}")
    return Path(json.loads(printed)["Dir"])


def _change(package: Path) -> None:
    for path in package.glob("*_test.go"):
        text = path.read_text()
        for url, name in _URLS.items():
            text = text.replace(url, name)
        if path.name == "helper_for_test.go":
            text = text.replace("const (\n", "var (\n", 1)
        path.write_text(text)
    (package / "peer_urls.go").write_text(_URLS_FILE)


def go() -> str:
    """Return the path of Go. Raises Unavailable."""
    program = shutil.which("go", path=f"{os.environ['PATH']}:/usr/local/go/bin")
    if program is None:
        raise Unavailable("there is no go")
    return program


def _go(folder: Path, *arguments: str) -> str:
    done = Patience("go").run((go(), *arguments), cwd=folder)
    if done.returncode:
        raise Unavailable(f"go {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


class Run:
    """Runs tests at these URLs."""

    def __init__(self, built: Suite, service_url: str, admin_url: str) -> None:
        self._suite = built
        self._urls = {
            "PEER_SERVICE_URL": service_url,
            "PEER_ADMIN_URL": admin_url,
        }

    def run(self, test: str, sidecar: Sidecar | None = None) -> Outcome:
        """Run one test. Raises Stalled if `go test` does not end it."""
        before = _seen_by(sidecar)
        limits = (f"-test.run=^{test}$", f"-test.timeout={TEST_SECONDS}s", "-test.v", "-test.count=1")
        command = (str(self._suite.program), *limits)
        # Tests also print payloads that are no text.
        with tempfile.TemporaryFile() as printed:
            done = Patience(test).run(
                command, cwd=self._suite.folder, env=os.environ | self._urls, stdout=printed, stderr=printed
            )
            printed.seek(0)
            output = printed.read().decode(errors="replace")
        entries, producers = (now - then for now, then in zip(_seen_by(sidecar), before, strict=True))
        result = "fail" if done.returncode else "skip" if f"--- SKIP: {test} " in output else "pass"
        return Outcome(result, entries, producers, output)


def _seen_by(sidecar: Sidecar | None) -> tuple[int, int]:
    if sidecar is None:
        return 0, 0
    # A page of metrics is served for this long.
    time.sleep(FRESH_SECONDS)
    page = scrape(sidecar)
    return int(page.value("seqdedupe_door_receipts_total")), int(page.value("seqdedupe_door_opened_producers_total"))


def serve(broker: Broker, folder: Path) -> Sidecar:
    """Return a sidecar, not started, with a door in front of the broker."""
    return Sidecar(
        folder,
        pulsar_namespaces=NAMESPACE,
        pulsar_listen="127.0.0.1:0",
        pulsar_serve_consumers=True,
        metrics_listen="127.0.0.1:0",
        **broker.sidecar_keys,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--broker", action="store_true", help="without the door")
    parser.add_argument("--output", type=Path, help="the folder for the output of each test")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args(arguments)
    built = suite()
    tests = options.tests or built.tests(*FILES)
    with tempfile.TemporaryDirectory() as folder, Broker(get(), **BROKER_KEYS) as broker:
        sidecar = None if options.broker else serve(broker, Path(folder))
        if sidecar is None:
            run = Run(built, broker.service_url, broker.admin_url)
        else:
            sidecar.start()
            run = Run(built, f"pulsar://{door_of(sidecar)}", broker.admin_url)
        try:
            for number, test in enumerate(tests, 1):
                outcome = run.run(test, sidecar)
                print(
                    f"{number}/{len(tests)} {test} {outcome.result} {outcome.entries} {outcome.producers}", flush=True
                )
                if options.output:
                    (options.output / f"{test}.txt").write_text(outcome.output)
        finally:
            if sidecar is not None:
                sidecar.close()


if __name__ == "__main__":
    main()
