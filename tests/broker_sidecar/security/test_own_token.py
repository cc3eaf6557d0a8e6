"""The data directory's own token: made once, wanted for every call, replaced while the sidecar serves."""

import os
import stat
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2

from broker_sidecar.security import tokens
from broker_sidecar.security.tokens import MIN_TOKEN_LETTERS, OwnToken
from seqdedupe.errors import EXIT_WRONG, ConfigurationError, SeqdedupeError
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, read_pb2, read_pb2_grpc
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, refused
from tests.broker_sidecar.health import health_of
from tests.broker_sidecar.security.showing import (
    METHODS,
    Metadata,
    bearer,
    is_served,
    made,
    token_of,
    unary,
    wait_until,
)

LOGS = ("embedded", "broker")
HEALTH = "grpc.health.v1.Health"
VERSION = "/seqdedupe.v1.AdminService/GetVersion"
CREATE = "/seqdedupe.v1.AdminService/CreateTopic"
TOPICS = "/seqdedupe.v1.AdminService/ListTopics"
OTHER = "another-token-that-is-long-enough"


@pytest.fixture(scope="module", params=LOGS)
def closed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that wants its token, with either kind of log, and answers each call without it, however many come."""
    folder = tmp_path_factory.mktemp(f"closed-{request.param}")
    environment, module = with_constants.environment(connections__UNKNOWN_CALLS=1 << 60), with_constants.MODULE
    with Sidecar(folder, module=module, environment=environment, authentication="token", log=request.param) as sidecar:
        yield sidecar


@pytest.fixture
def channel(closed: Sidecar) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(closed.address) as channel:
        yield channel


def request_of(method: MethodDescriptor) -> bytes:
    """For health, which is open where the whole is asked for, that of a topic."""
    of_a_topic = health_pb2.HealthCheckRequest(service="persistent://public/default/t").SerializeToString()
    return of_a_topic if method.containing_service.full_name == HEALTH else b""


@pytest.mark.parametrize("method", METHODS, ids=lambda method: str(method.name))
def test_no_call_is_answered_without_the_token(
    closed: Sidecar, channel: grpc.Channel, method: MethodDescriptor
) -> None:
    if not is_served(method, str(closed.keys["log"])):
        return
    token = token_of(closed)
    wrong: list[Metadata] = [
        (),
        bearer(OTHER),
        bearer(""),
        bearer(token[:-1]),
        bearer(token + "x"),
        bearer(token.swapcase()),
        (("authorization", token),),
        (("authorization", f"Basic {token}"),),
        bearer(token) + bearer(OTHER),
        bearer(OTHER) + bearer(token),
        (("token", token),),
    ]
    for metadata in wrong:
        answer = made(channel, method, request_of(method), metadata)
        assert answer is not None, metadata
        assert answer.reason == "UNAUTHENTICATED"
        assert answer.retry_delay_ms == -1
        assert token not in str(answer)
    # It is for the token that they were refused.
    assert made(channel, method, request_of(method), bearer(token)) is None


def test_the_calls_that_are_tried_are_all_there_are(closed: Sidecar, channel: grpc.Channel) -> None:
    from tests.broker_sidecar.reflected import Reflected

    token = token_of(closed)
    credentials = grpc.composite_channel_credentials(
        grpc.local_channel_credentials(), grpc.access_token_call_credentials(token)
    )
    with grpc.secure_channel(closed.address, credentials) as known:
        served = Reflected(known).services()
    log = str(closed.keys["log"])
    assert served == sorted({method.containing_service.full_name for method in METHODS if is_served(method, log)})


def test_the_health_of_the_whole_is_open(channel: grpc.Channel) -> None:
    serving = health_pb2.HealthCheckResponse.SERVING
    health = health_of(channel)
    assert health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS).status == serving
    watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS)
    assert next(iter(watch)).status == serving
    watch.cancel()
    # What is no request at all is none for the whole.
    check = unary(channel, f"/{HEALTH}/Check")
    assert refused(lambda: check(b"\xff", timeout=TIMEOUT_SECONDS)).reason == "UNAUTHENTICATED"


@pytest.fixture
def short_folder() -> Iterator[str]:
    """One whose path leaves room for a socket's name."""
    with tempfile.TemporaryDirectory() as folder:
        yield folder


def test_a_unix_socket_wants_it_too_and_none_lets_everybody_in(tmp_path: Path, short_folder: str) -> None:
    address = f"unix:{short_folder}/s"
    with Sidecar(tmp_path, listen=address, authentication="token") as sidecar:
        with grpc.insecure_channel(address) as channel:
            version = unary(channel, VERSION)
            assert refused(lambda: version(b"", timeout=TIMEOUT_SECONDS)).reason == "UNAUTHENTICATED"
            assert version(b"", timeout=TIMEOUT_SECONDS, metadata=bearer(token_of(sidecar)))
        token = sidecar.token_file.read_bytes()
        sidecar.stop()
        sidecar.keys["authentication"] = "none"
        sidecar.start()
        with grpc.insecure_channel(address) as channel:
            assert unary(channel, VERSION)(b"", timeout=TIMEOUT_SECONDS)
        assert sidecar.token_file.read_bytes() == token


def test_it_is_made_once_and_only_its_owner_may_read_it(tmp_path: Path) -> None:
    with Sidecar(tmp_path, authentication="token") as sidecar:
        assert stat.S_IMODE(sidecar.token_file.stat().st_mode) == 0o600
        token = token_of(sidecar)
        assert len(token) == 43
        [told] = [entry["export"] for entry in sidecar.log if "export" in entry]
        assert told == f"export SEQDEDUPE_TOKEN_FILE={sidecar.token_file}"
        assert not any(token in str(entry) for entry in [*sidecar.log, *sidecar.errors])
        sidecar.restart()
        assert token_of(sidecar) == token
    other = tmp_path / "other"
    other.mkdir()
    assert tokens.make(other).read_text().strip() != token
    assert [path.name for path in other.iterdir()] == ["token"]


def test_workers_have_one_which_is_the_parents(tmp_path: Path) -> None:
    with Sidecar(tmp_path, workers=2, authentication="token") as sidecar:
        token = token_of(sidecar)
        for address in sidecar.address.split(","):
            with grpc.insecure_channel(address) as channel:
                version = unary(channel, VERSION)
                assert version(b"", timeout=TIMEOUT_SECONDS, metadata=bearer(token))
                assert refused(partial(version, b"", timeout=TIMEOUT_SECONDS)).reason == "UNAUTHENTICATED"
        assert [path.relative_to(sidecar.data) for path in sidecar.data.rglob("token*")] == [Path("token")]
        assert len([entry for entry in sidecar.log if "export" in entry]) == 1


def test_it_stays_when_the_number_of_workers_changes(tmp_path: Path) -> None:
    with Sidecar(tmp_path, authentication="token") as sidecar:
        token = token_of(sidecar)
        with grpc.insecure_channel(sidecar.address) as channel:
            request = admin_pb2.CreateTopicRequest(topic="t").SerializeToString()
            unary(channel, CREATE)(request, metadata=bearer(token), timeout=TIMEOUT_SECONDS)
        assert sidecar.stop() == 0
    for workers in (2, 1):
        sidecar = Sidecar(tmp_path, workers=workers, authentication="token")
        sidecar.keys["workers"] = workers
        with sidecar:
            assert token_of(sidecar) == token
            with grpc.insecure_channel(sidecar.address.split(",")[0]) as channel:
                assert unary(channel, TOPICS)(b"", metadata=bearer(token), timeout=TIMEOUT_SECONDS)
            assert sidecar.stop() == 0


@pytest.mark.parametrize(
    ("content", "mode", "why"),
    [
        (b"", 0o600, "holds no token"),
        (b"\n", 0o600, "holds no token"),
        (b"x" * (MIN_TOKEN_LETTERS - 1), 0o600, "holds no token"),
        (b"two words that are long enough", 0o600, "holds no token"),
        (b"\x00" * 40, 0o600, "holds no token"),
        (b"x" * 10_000, 0o600, "holds no token"),
        (b"x" * 40, 0o604, "mode 604"),
        (b"x" * 40, 0o620, "mode 620"),
        (None, 0, "Is a directory"),
    ],
)
def test_a_file_that_is_no_secret_ends_the_start(tmp_path: Path, content: bytes | None, mode: int, why: str) -> None:
    path = tmp_path / "token"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
        path.chmod(mode)
    with pytest.raises(ConfigurationError, match=why) as raised:
        tokens.read(tokens.make(tmp_path))
    assert raised.value.reason == "INVALID_CONFIGURATION"
    assert raised.value.hint
    assert content is None or path.read_bytes() == content


def test_the_sidecar_says_so_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "token").write_text("")
    sidecar = Sidecar(tmp_path, authentication="token")
    sidecar.spawn()
    assert sidecar.wait() == EXIT_WRONG
    [line] = sidecar.errors
    assert "INVALID_CONFIGURATION" in line
    assert str(sidecar.token_file) in line


def test_the_group_may_read_it_if_somebody_says_so(tmp_path: Path) -> None:
    path = tokens.make(tmp_path)
    path.chmod(0o640)
    assert tokens.read(path)


def test_a_link_is_followed(tmp_path: Path) -> None:
    """As where secrets are mounted."""
    (tmp_path / "elsewhere").write_text(OTHER)
    (tmp_path / "elsewhere").chmod(0o600)
    (tmp_path / "token").symlink_to(tmp_path / "elsewhere")
    assert tokens.read(tokens.make(tmp_path)) == OTHER.encode()


def test_what_others_made_meanwhile_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def later(new: Path, path: Path) -> None:
        path.write_text(OTHER)
        path.chmod(0o600)
        link(new, path)

    monkeypatch.setattr(os, "link", later)
    assert tokens.read(tokens.make(tmp_path)) == OTHER.encode()
    assert [path.name for path in tmp_path.iterdir()] == ["token"]


def replaced(path: Path, token: str) -> None:
    """As an operator rotates it."""
    new = path.with_name("token.new")
    new.write_text(f"{token}\n")
    new.chmod(0o600)
    os.replace(new, path)


def test_one_that_is_replaced_counts_at_once_and_the_former_has_expired(tmp_path: Path) -> None:
    changes: list[str] = []
    path = tokens.make(tmp_path)
    first = path.read_bytes().strip()
    token = OwnToken(path, lambda: changes.append("changed"))
    replaced(path, OTHER)
    assert token.is_shown(OTHER.encode())
    assert changes == ["changed"]
    with pytest.raises(SeqdedupeError) as raised:
        token.is_shown(first)
    assert (raised.value.reason, raised.value.retry_delay_ms) == ("TOKEN_EXPIRED", 0)
    assert not token.is_shown(b"neither of the two")
    # What is no token, or gone, changes nothing, and is reported.
    for spoil in (lambda: path.write_text(""), lambda: path.chmod(0o644), path.unlink):
        spoil()
        assert not token.is_shown(b"neither of the two")
        assert token.is_shown(OTHER.encode())
        assert token.watched.problem is not None
    assert changes == ["changed"]
    replaced(path, OTHER)
    token.watched.look(at_once=True)
    assert token.watched.problem is None
    assert changes == ["changed"]


def test_open_streams_end_when_it_is_replaced_and_the_new_one_opens_others(tmp_path: Path) -> None:
    with Sidecar(tmp_path, authentication="token") as sidecar, grpc.insecure_channel(sidecar.address) as channel:
        token = token_of(sidecar)
        unary(channel, CREATE)(
            admin_pb2.CreateTopicRequest(topic="t").SerializeToString(), metadata=bearer(token), timeout=TIMEOUT_SECONDS
        )
        reading = read_pb2_grpc.ReadServiceStub(channel)
        follow = read_pb2.ReadStreamRequest(topic="t", follow=True)
        stream = reading.ReadStream(follow, metadata=bearer(token), timeout=TIMEOUT_SECONDS)
        stream.initial_metadata()
        replaced(sidecar.token_file, OTHER)
        answer = refused(lambda: list(stream))
        assert (answer.reason, answer.retry_delay_ms) == ("TOKEN_EXPIRED", 0)
        assert answer.code is grpc.StatusCode.UNAUTHENTICATED
        again = refused(lambda: list(reading.ReadStream(follow, metadata=bearer(token), timeout=TIMEOUT_SECONDS)))
        assert again.reason == "TOKEN_EXPIRED"
        # The new one's stream stays.
        fresh = reading.ReadStream(follow, metadata=bearer(OTHER), timeout=TIMEOUT_SECONDS)
        fresh.initial_metadata()
        sidecar.token_file.write_text("")
        wait_until(lambda: any("stays in force" in str(entry["event"]) for entry in sidecar.log))
        assert fresh.is_active()
        fresh.cancel()
