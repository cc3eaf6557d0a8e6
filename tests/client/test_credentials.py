"""What credentials are, where they come from, and what is never in an error."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from seqdedupe.client import BrokerClient, Client, Credentials, SeqdedupeError, blocking
from seqdedupe.client.credentials import MAX_FILE_BYTES
from seqdedupe.errors import ConfigurationError
from seqdedupe.limits import MAX_TOKEN_BYTES
from tests.certificates import Authority

SECRET = "s3cr3t-t0ken"

VARIABLES = (
    "SEQDEDUPE_TOKEN",
    "SEQDEDUPE_TOKEN_FILE",
    "SEQDEDUPE_TLS_CA_FILE",
    "SEQDEDUPE_TLS_CERTIFICATE_FILE",
    "SEQDEDUPE_TLS_KEY_FILE",
    "SEQDEDUPE_ALLOW_INSECURE_TOKEN",
    "SEQDEDUPE_SIDECAR_USER",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment that says nothing."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def written(path: Path, text: str = SECRET + "\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_the_environment_says_where_the_token_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Credentials.from_environment() == Credentials()
    assert Credentials.from_environment().token_now() is None
    usual = written(home / ".config" / "seqdedupe" / "token", "usual")
    assert Credentials.from_environment() == Credentials(token_file=str(usual))
    named = written(home / "named", "named")
    monkeypatch.setenv("SEQDEDUPE_TOKEN_FILE", str(named))
    assert Credentials.from_environment().token_now() == "named"
    monkeypatch.setenv("SEQDEDUPE_TOKEN", "itself")
    assert Credentials.from_environment(token_file="", tls_ca_file="") == Credentials(token="itself")
    assert Credentials.from_environment(token_file=str(usual)) == Credentials(token_file=str(usual))
    for variable in ("SEQDEDUPE_TOKEN", "SEQDEDUPE_TOKEN_FILE"):
        monkeypatch.setenv(variable, "")  # as a file for a container's environment leaves it
    assert Credentials.from_environment().token_now() == "usual"


def test_the_environment_says_where_the_files_for_tls_are(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = Authority(home)
    own = authority.issue("own")
    monkeypatch.setenv("SEQDEDUPE_TLS_CA_FILE", str(authority.ca_file))
    monkeypatch.setenv("SEQDEDUPE_TLS_CERTIFICATE_FILE", str(own.certificate_file))
    monkeypatch.setenv("SEQDEDUPE_TLS_KEY_FILE", str(own.key_file))
    monkeypatch.setenv("SEQDEDUPE_ALLOW_INSECURE_TOKEN", "true")
    found = Credentials.from_environment()
    assert found == Credentials(
        tls_ca_file=str(authority.ca_file),
        tls_certificate_file=str(own.certificate_file),
        tls_key_file=str(own.key_file),
        allow_insecure_token=True,
    )
    assert found.has_tls
    assert not found.has_token


def test_a_file_and_a_function_are_asked_anew_each_time(tmp_path: Path) -> None:
    path = written(tmp_path / "token", "  first\r\n")
    of_file = Credentials(token_file=path)
    answers = iter(["one", "two"])
    of_function = Credentials(token=lambda: next(answers))
    assert (of_file.token_now(), of_function.token_now()) == ("first", "one")
    path.write_text("second")
    assert (of_file.token_now(), of_function.token_now()) == ("second", "two")


def folder(path: Path) -> Credentials:
    return Credentials(token_file=path)


def missing(path: Path) -> Credentials:
    return Credentials(token_file=path / "nowhere")


def pipe(path: Path) -> Credentials:
    os.mkfifo(path / "pipe")
    return Credentials(token_file=path / "pipe")


def endless(path: Path) -> Credentials:
    return Credentials(token_file="/dev/zero")


def large(path: Path) -> Credentials:
    return Credentials(token_file=written(path / "large", SECRET + "\n" * MAX_FILE_BYTES))


def null(path: Path) -> Credentials:
    return Credentials(token_file=f"{path}/a\0b")


def missing_authority(path: Path) -> Credentials:
    return Credentials(token=SECRET, tls_ca_file=path / "nowhere")


def without_key(path: Path) -> Credentials:
    return Credentials(token=SECRET, tls_certificate_file=written(path / "own.pem"))


def two_tokens(path: Path) -> Credentials:
    return Credentials(token=SECRET, token_file=written(path / "token"))


@pytest.mark.parametrize(
    "make", [folder, missing, pipe, endless, large, null, missing_authority, without_key, two_tokens]
)
def test_what_cannot_be_is_refused_when_they_are_made(tmp_path: Path, make: Callable[[Path], Credentials]) -> None:
    with pytest.raises(SeqdedupeError) as e:
        make(tmp_path)
    assert isinstance(e.value, ConfigurationError)
    assert (e.value.reason, e.value.hint != "") == ("INVALID_CREDENTIALS", True)
    assert "tried again" not in e.value.hint
    assert SECRET not in str(e.value) + repr(e.value)


@pytest.mark.parametrize(
    "token",
    ["", " \n", f"{SECRET}\n{SECRET}", f"{SECRET}\0", f"{SECRET} more", f"{SECRET}ü", "x" * (MAX_TOKEN_BYTES + 1)],
)
def test_what_is_no_token_is_refused_and_not_shown(tmp_path: Path, token: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(token.encode())
    for given in ({"token": token}, {"token_file": str(path)}):
        with pytest.raises(SeqdedupeError, match="is no token") as e:
            Credentials(**given)  # type: ignore[arg-type]
        assert e.value.reason == "INVALID_CREDENTIALS"
        assert not token.strip() or token.strip() not in str(e.value)
        assert SECRET not in str(e.value)
    with pytest.raises(SeqdedupeError, match="is no token") as e:
        Credentials(token=lambda: token).token_now()
    assert e.value.reason == "CREDENTIALS_UNAVAILABLE"


def test_a_function_that_fails_is_told_without_what_it_says() -> None:
    def fails() -> str:
        raise LookupError(SECRET)

    with pytest.raises(SeqdedupeError, match="raised LookupError") as e:
        Credentials(token=fails).token_now()
    assert e.value.reason == "CREDENTIALS_UNAVAILABLE"
    assert SECRET not in str(e.value)


def test_a_token_shows_nowhere() -> None:
    given = Credentials(token=SECRET)
    client = blocking.Client("127.0.0.1:1", given)
    for shown in (repr(given), str(given), repr(client), repr(vars(client))):
        assert SECRET not in shown
    assert pickle.loads(pickle.dumps(given)) == given


@pytest.mark.parametrize("make", [Client, blocking.Client, BrokerClient])
def test_a_client_without_credentials_has_those_of_the_environment(
    home: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[..., object]
) -> None:
    make("127.0.0.1:1")
    monkeypatch.setenv("SEQDEDUPE_TOKEN_FILE", str(home / "nowhere"))
    with pytest.raises(SeqdedupeError) as e:
        make("127.0.0.1:1")
    assert e.value.reason == "INVALID_CREDENTIALS"
    make("127.0.0.1:1", Credentials())
