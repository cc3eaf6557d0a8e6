"""A function and a sidecar that wants to know who calls."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from seqdedupe.client import Credentials, SeqdedupeError
from seqdedupe.client.blocking import Client
from seqdedupe.functions.deployment import settings_of
from seqdedupe.functions.instance import credentials_of
from seqdedupe.testing import Sidecar
from tests.certificates import Authority, guarded_sidecar
from tests.functions.runtime import TIMEOUT_SECONDS, Ended, Runtime, details, inputs

COUNT = 20


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[Sidecar]:
    with guarded_sidecar(tmp_path_factory.mktemp("guarded"), authority) as sidecar:
        yield sidecar


@pytest.fixture
def start(guarded: Sidecar, authority: Authority, topic: str) -> Iterator[Callable[..., Runtime]]:
    """Starts an instance whose output topic is the test's own."""
    started: list[Runtime] = []

    def begin(**config: str) -> Runtime:
        config |= {"output_topic": topic, "sidecar_tls_ca_file": str(authority.ca_file)}
        deployed = details(name=topic)
        started.append(Runtime(guarded.address, "tests.functions.examples.Copy", deployed=deployed, **config))
        return started[-1]

    yield begin
    for runtime in started:
        if runtime.instance is not None:
            runtime.instance.close()


@pytest.mark.parametrize("key", ["sidecar_token_file", "sidecar_token_secret"])
def test_a_function_shows_a_file_or_a_secret(
    start: Callable[..., Runtime], guarded: Sidecar, authority: Authority, topic: str, key: str
) -> None:
    runtime = start(**{key: str(guarded.token_file)})
    runtime.secrets[str(guarded.token_file)] = guarded.token_file.read_text()
    runtime.give(inputs(COUNT))
    runtime.until_acknowledged(COUNT)
    shows = Credentials(token_file=guarded.token_file, tls_ca_file=authority.ca_file)
    with Client(guarded.address, shows) as client, client.reader(topic) as reader:
        assert len(list(reader)) == COUNT


def test_without_it_ends_and_says_why(start: Callable[..., Runtime]) -> None:
    runtime = start(sidecar_token_secret="wrong")
    runtime.secrets["wrong"] = "s3cr3t-t0ken"
    with contextlib.suppress(Ended):
        runtime.give(inputs(COUNT))
    assert runtime.process.ended.wait(TIMEOUT_SECONDS)
    assert "UNAUTHENTICATED" in runtime.process.why
    assert "s3cr3t" not in runtime.process.why


def test_a_secret_is_asked_for_anew_and_has_to_be_there(tmp_path: Path) -> None:
    settings = settings_of({"wrapped": "m", "sidecar_token_secret": "t"})
    secrets = {"t": "one"}
    credentials = credentials_of(settings, secrets.get)
    assert credentials.token_now() == "one"
    secrets["t"] = "two"
    assert credentials.token_now() == "two"
    del secrets["t"]
    with pytest.raises(SeqdedupeError, match="CREDENTIALS_UNAVAILABLE"):
        credentials.token_now()
    with pytest.raises(SeqdedupeError, match="deployed without this secret") as e:
        credentials_of(settings, secrets.get)
    assert e.value.reason == "INVALID_FUNCTION"
    secrets["t"] = "one"
    settings = settings_of({"wrapped": "m", "sidecar_token_secret": "t", "sidecar_token_file": str(tmp_path)})
    with pytest.raises(SeqdedupeError, match="both a token and a token file"):
        credentials_of(settings, secrets.get)
