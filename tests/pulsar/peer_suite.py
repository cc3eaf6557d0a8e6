"""The tests of Pulsar's Go client, with the door of a sidecar between the client and a real broker.

    python -m tests.kernels tests.pulsar.peer_suite                   all tests through the door
    python -m tests.kernels tests.pulsar.peer_suite TestReader        these tests through the door
    python -m tests.kernels tests.pulsar.peer_suite --broker          all tests directly at the broker, to compare

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
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pulsar_broker import distribution
from pulsar_broker.distribution import FOLDER, Unavailable
from pulsar_broker.standalone import Broker
from seqdedupe.http_server import FRESH_SECONDS
from seqdedupe.testing import Patience, Sidecar
from tests.broker_sidecar.door.wire import door_of
from tests.broker_sidecar.metrics.scraping import scrape
from tests.tiers import GO

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


_BY_REST = "the test makes its partitioned topic over REST, and no sidecar takes such a topic over unasked"
_ENCRYPTED = "the door refuses encrypted messages"
_ADMIN = "the test asks a web service at localhost:8080 that is not there, and fails without the door too"
_DOCKER = "the test starts its own broker in Docker, and does not meet the door"

NOT_PASSED: Mapping[str, str] = {
    "TestFlushInPartitionedProducer": _BY_REST,
    "TestRoundRobinRouterPartitionedProducer": _BY_REST,
    "TestMessageRouter": _BY_REST,
    "TestMessageSingleRouter": "the suite skips it",
    "TestNonPersistentTopic": "the door refuses topics that are not persistent",
    "TestProducerMetadata": "the topic's statistics show the sidecar's producer",
    "TestBatchDelayMessage": "it passes at a broker because the entry's ID is 0: the consumer gets the message at once",
    "TestProducerWithRSAEncryption": _ENCRYPTED,
    "TestProducerWithInterceptors": "the test counts acknowledgements that its consumer may still have to send",
    "TestProducerKeepReconnectingAndThenCallClose": _DOCKER,
    "TestSendAsyncCouldTimeoutWhileReconnecting": _DOCKER,
    "TestPartitionUpdateFailed": _BY_REST,
    "TestProducerReconnectWhenBacklogQuotaExceed": "the test makes its namespace, and the sidecar has another one",
    "TestReaderOnPartitionedTopic": _ADMIN,
    "TestProducerReaderRSAEncryption": _ENCRYPTED,
    "TestReaderGetLastMessageIDOnMultiTopics": _ADMIN,
    "TestBytesSchema": "brokers refuse a consumer with a schema of bytes while the sidecar writes to the topic",
    "TestProtoNativeSchema": "the door refuses schemas of the type ProtobufNative",
}
"""Why a test does not pass through the door. All others must pass."""


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


def built(folder: Path = FOLDER) -> Suite:
    """Return the suite that is there. Raises Unavailable; nothing is fetched."""
    there = _place(folder)
    if not there.exists():
        raise Unavailable("the suite is not here yet: `make peer-tests` fetches it")
    return Suite(there / "suite.test", there / "pulsar")


def get(folder: Path = FOLDER) -> Suite:
    """Return the suite. It is fetched and compiled if it is not there. Raises Unavailable."""
    there = _place(folder)
    if not there.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Made next to its place and renamed, so a suite at its place is whole.
        with tempfile.TemporaryDirectory(dir=folder, prefix="unfinished-") as unfinished:
            printed = _go(Path(unfinished), "mod", "download", "-json", f"{MODULE}@{VERSION}")
            copy = Path(unfinished) / "suite"
            shutil.copytree(json.loads(printed)["Dir"], copy, copy_function=shutil.copyfile)
            for path in (copy, *copy.rglob("*")):
                path.chmod(0o755 if path.is_dir() else 0o644)
            _change(copy / "pulsar")
            _go(copy, "test", "-c", "-o", "suite.test", "./pulsar")
            copy.rename(there)
    return built(folder)


def _place(folder: Path) -> Path:
    changes = hashlib.sha256(repr((_URLS, _URLS_FILE)).encode()).hexdigest()[:12]
    return folder / f"pulsar-client-go-{VERSION}-{changes}"


def _change(package: Path) -> None:
    for path in package.glob("*_test.go"):
        text = path.read_text()
        for url, name in _URLS.items():
            text = text.replace(url, name)
        if path.name == "helper_for_test.go":
            text = text.replace("const (\n", "var (\n", 1)
        path.write_text(text)
    (package / "peer_urls.go").write_text(_URLS_FILE)


def _go(folder: Path, *arguments: str) -> str:
    if (program := GO.where("go")) is None:
        raise Unavailable("there is no go")
    done = Patience("go").run((program, *arguments), cwd=folder)
    if done.returncode:
        raise Unavailable(f"go {arguments[0]} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")
    return done.stdout


class Run:
    """Runs tests at these URLs."""

    def __init__(self, suite: Suite, service_url: str, admin_url: str, limit_seconds: float = TEST_SECONDS) -> None:
        self._suite = suite
        self._limit = f"-test.timeout={limit_seconds:g}s"
        self._urls = {
            "PEER_SERVICE_URL": service_url,
            "PEER_ADMIN_URL": admin_url,
        }

    def run(self, test: str, sidecar: Sidecar | None = None) -> Outcome:
        """Run one test. Raises Stalled if `go test` does not end it."""
        before = _seen_by(sidecar)
        limits = (f"-test.run=^{test}$", self._limit, "-test.v", "-test.count=1")
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
        pulsar_entry_format="native",
        metrics_listen="127.0.0.1:0",
        **broker.sidecar_keys,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--get", action="store_true", help="only fetch and compile the suite")
    parser.add_argument("--broker", action="store_true", help="without the door")
    parser.add_argument("--output", type=Path, help="the folder for the output of each test")
    parser.add_argument("tests", nargs="*")
    options = parser.parse_args(arguments)
    try:
        suite = get()
        if options.get:
            print(f"The suite is in {suite.folder}")
            return
        home = distribution.get()
    except Unavailable as e:
        sys.exit(f"No suite: {e}")
    tests = options.tests or suite.tests(*FILES)
    with tempfile.TemporaryDirectory() as folder, Broker(home, **BROKER_KEYS) as broker:
        if options.broker:
            outcomes = _run_all(Run(suite, broker.service_url, broker.admin_url), tests, None, options.output)
        else:
            with serve(broker, Path(folder)) as sidecar:
                run = Run(suite, f"pulsar://{door_of(sidecar)}", broker.admin_url)
                outcomes = _run_all(run, tests, sidecar, options.output)
    print("\n".join(table(outcomes)))
    unexpected = [test for test, outcome in outcomes.items() if outcome.result == "fail" and test not in NOT_PASSED]
    if unexpected and not options.broker:
        sys.exit(f"These tests should pass: {', '.join(unexpected)}")


def _run_all(run: Run, tests: Sequence[str], sidecar: Sidecar | None, output: Path | None) -> dict[str, Outcome]:
    outcomes = dict[str, Outcome]()
    for number, test in enumerate(tests, 1):
        outcome = run.run(test, sidecar)
        if outcome.result == "fail" and test not in NOT_PASSED:
            # Some tests have limits of their own, down to 200 ms.
            print(f"{number} of {len(tests)}: {test} has failed, and runs again", flush=True)
            outcome = run.run(test, sidecar)
        outcomes[test] = outcome
        print(f"{number} of {len(tests)}: {test} {outcome.result}", flush=True)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / f"{test}.txt").write_text(outcome.output)
    return outcomes


def table(outcomes: Mapping[str, Outcome]) -> Iterator[str]:
    """Yield the lines of a table of the outcomes, and the numbers of tests."""
    yield from ("| test | result | at the door | reason |", "|---|---|---|---|")
    for test, outcome in outcomes.items():
        used = f"{outcome.producers} producers, {outcome.entries} receipts" if outcome.producers else ""
        reason = "" if outcome.result == "pass" else NOT_PASSED.get(test, "")
        yield f"| `{test}` | {outcome.result} | {used} | {reason} |"
    passed = [outcome for outcome in outcomes.values() if outcome.result == "pass"]
    published, opened = sum(one.entries > 0 for one in passed), sum(one.producers > 0 for one in passed)
    yield f"{len(passed)} of {len(outcomes)} passed; {opened} of these opened a producer, and {published} published."


if __name__ == "__main__":
    main()
