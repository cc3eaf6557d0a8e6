"""Files that are replaced while a sidecar runs: in force as a whole, or not at all, and everybody can see which."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from broker_sidecar import config
from broker_sidecar.security import tokens
from broker_sidecar.security.audit import Audit
from broker_sidecar.security.authentication import bytes_of
from broker_sidecar.security.rules import read_rules
from broker_sidecar.security.tokens import read_keys
from seqdedupe.client.blocking import Client
from seqdedupe.client.credentials import Credentials
from seqdedupe.errors import SeqdedupeError
from seqdedupe.files import MAX_NAMED_BYTES
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.health import health_of
from tests.broker_sidecar.metrics.scraping import scrape
from tests.broker_sidecar.security.signing import AUDIENCE, Issuer, write_keys

TIMEOUT_SECONDS = LAST_RESORT_SECONDS

ALLOWED = '[[allow]]\nsubjects = ["shop"]\nactions = ["publish", "create", "read"]\ntopics = ["orders"]\n'
NOTHING = '[[allow]]\nsubjects = ["else"]\nactions = ["read"]\ntopics = ["orders"]\n'


class Reloading(Sidecar):
    """A sidecar that takes signed tokens and rules, and writes an audit trail."""

    def __init__(self, folder: Path, workers: int = 1) -> None:
        self.issuer = Issuer("k")
        self.rules, self.audit = folder / "rules.toml", folder / "audit.jsonl"
        self.rules.write_text(ALLOWED)
        super().__init__(
            folder,
            authentication="token",
            token_keys_file=write_keys(folder / "keys.json", [self.issuer.jwk()]),
            token_audience=AUDIENCE,
            rules_file=self.rules,
            audit_file=self.audit,
            metrics_listen="127.0.0.1:0",
            workers=workers,
        )

    def client(self) -> Client:
        return Client(self.address, credentials=Credentials(token=self.issuer.token()))

    def told(self, event: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.audit.read_text().splitlines()]
        return [line for line in found if line["event"] == event]

    def health(self, service: str = "configuration") -> int:
        with grpc.insecure_channel(self.address) as channel:
            return (
                health_of(channel)
                .Check(health_pb2.HealthCheckRequest(service=service), timeout=LAST_RESORT_SECONDS)
                .status
            )


def until(is_so: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + TIMEOUT_SECONDS
    while not is_so():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


@pytest.fixture
def sidecar(tmp_path: Path) -> Iterator[Reloading]:
    with Reloading(tmp_path) as sidecar:
        yield sidecar


def replace(path: Path, text: str) -> None:
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


@pytest.mark.parametrize("has_signal", [True, False], ids=["SIGHUP", "by itself"])
def test_other_rules_are_in_force_for_open_streams_too(sidecar: Reloading, has_signal: bool) -> None:
    def publish() -> None:
        with sidecar.client() as client, client.producer("orders", "p") as producer:
            producer.send(b"1", 1).result(TIMEOUT_SECONDS)
            replace(sidecar.rules, NOTHING)
            if has_signal:
                sidecar.signal(signal.SIGHUP)
            until(lambda: any(line["what"] == "the rules file" for line in sidecar.told("read again")))
            producer.send(b"2", 2).result(TIMEOUT_SECONDS)

    with pytest.raises(SeqdedupeError, match="NOT_ALLOWED"):
        publish()
    # No call waits until its denial is written.
    until(lambda: bool(sidecar.told("denied")))
    (denied, *_) = sidecar.told("denied")
    assert (denied["subject"], denied["kind"], denied["action"], denied["rule"]) == ("shop", "jwt", "publish", "")


def test_rules_that_cannot_be_read_change_nothing_and_health_says_so(sidecar: Reloading) -> None:
    assert sidecar.health() == health_pb2.HealthCheckResponse.SERVING
    with sidecar.client() as client, client.producer("orders", "p") as producer:
        for text in ("[[allow", '[[allow]]\nsubjects = ["shop"]\nactions = ["rule the world"]\ntopics = ["*"]\n'):
            replace(sidecar.rules, text)
            sidecar.signal(signal.SIGHUP)
            until(lambda: sidecar.health() == health_pb2.HealthCheckResponse.NOT_SERVING)
        producer.send(b"1", 1).result(TIMEOUT_SECONDS)
        assert sidecar.health("") == health_pb2.HealthCheckResponse.SERVING
        assert scrape(sidecar).value("seqdedupe_configuration_in_force") == 0
        until(lambda: len(sidecar.told("not read again")) >= 2)
        assert "rules.toml" in sidecar.told("not read again")[-1]["why"]
        replace(sidecar.rules, ALLOWED)
        until(lambda: sidecar.health() == health_pb2.HealthCheckResponse.SERVING)
        until(lambda: scrape(sidecar).value("seqdedupe_configuration_in_force") == 1)
        producer.send(b"2", 2).result(TIMEOUT_SECONDS)


THINGS: dict[str, Callable[[Path], object]] = {
    "a pipe": os.mkfifo,
    "a folder": Path.mkdir,
    "a device without an end": lambda path: path.symlink_to("/dev/zero"),
    "a file of many bytes": lambda path: path.write_bytes(bytes(MAX_NAMED_BYTES + 1)),
}


def test_no_thing_in_the_place_of_a_file_holds_the_sidecar_up(sidecar: Reloading) -> None:
    files = {"the rules file": sidecar.rules, "the sidecar's token": sidecar.token_file}
    files["the keys of tokens"] = Path(str(sidecar.keys["token_keys_file"]))
    with sidecar.client() as client, client.producer("orders", "p") as producer:
        for k, make in enumerate(THINGS.values(), 1):
            before = len(sidecar.log)
            for path in files.values():
                new = path.with_suffix(".new")
                make(new)
                if path.is_dir():
                    path.rmdir()
                elif new.is_dir():
                    path.unlink()
                new.rename(path)
            sidecar.signal(signal.SIGHUP)
            until(
                lambda before=before: {  # type: ignore[misc]
                    line["event"].removeprefix("the former version of ").partition(" stays in force: ")[0]
                    for line in sidecar.log[before:]
                } >= {*files}
            )  # fmt: skip
            producer.send(b"%d" % k, k).result(TIMEOUT_SECONDS)
        # Where symbolic links lead to a file it is taken.
        (sidecar.folder / "other.toml").write_text(ALLOWED)
        sidecar.rules.unlink()
        sidecar.rules.symlink_to("other.toml")
        sidecar.signal(signal.SIGHUP)
        until(lambda: any(line["what"] == "the rules file" for line in sidecar.told("read again")))


@pytest.mark.parametrize("thing", THINGS)
def test_nothing_that_is_named_is_read_unless_it_is_a_file(tmp_path: Path, thing: str) -> None:
    path = tmp_path / "thing"
    THINGS[thing](path)
    for read in (read_keys, tokens.read, read_rules, bytes_of, lambda path: config.from_process(path, {})):
        with pytest.raises(SeqdedupeError) as raised:
            read(path)
        assert (raised.value.reason, str(path) in str(raised.value)) == ("INVALID_CONFIGURATION", True)
    with pytest.raises(SeqdedupeError, match="INVALID_CREDENTIALS"):
        Credentials(token_file=path)
    if not path.is_file():
        with pytest.raises(SeqdedupeError, match="AUDIT_UNAVAILABLE"):
            Audit(path)


def test_the_audit_trail_goes_on_in_a_new_file(sidecar: Reloading) -> None:
    older = sidecar.audit.rename(sidecar.audit.with_suffix(".1"))
    sidecar.signal(signal.SIGHUP)
    until(sidecar.audit.exists)
    until(lambda: len(sidecar.told("read again")) == 3)
    assert json.loads(sidecar.audit.read_text().splitlines()[0])["number"] == len(older.read_text().splitlines()) + 1


def test_workers_are_told_by_their_parent(tmp_path: Path) -> None:
    with Reloading(tmp_path, workers=2) as sidecar:
        sidecar.signal(signal.SIGHUP)
        for worker in range(2):
            path = tmp_path / f"audit.jsonl.{worker}"
            until(lambda path=path: path.exists() and path.read_text().count('"read again"') == 3)  # type: ignore[misc]
