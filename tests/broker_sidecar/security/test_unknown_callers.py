"""Calls without a token: the sidecar holds next to nothing for them, no matter what they send and which call it is.

A sidecar that asks nobody who they are is the control: it receives the same requests as a whole.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from broker_sidecar.connections import LOOK_SECONDS, MAX_HALF_BYTES, UNKNOWN_CALLS, UNREAD_BYTES
from broker_sidecar.gate import KNOWN_AT_ONCE, UNKNOWN_WAITING
from seqdedupe.client.blocking import Client
from seqdedupe.client.credentials import Credentials
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from seqdedupe.v1 import publish_pb2
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, refused
from tests.broker_sidecar.health import health_of
from tests.broker_sidecar.raw_http2 import RawConnection, message
from tests.broker_sidecar.security import flooding as flooding_program
from tests.broker_sidecar.security import hostile_calls
from tests.broker_sidecar.security.hostile_calls import HALF, KINDS, LARGEST, SMALL_GZIP, connected
from tests.broker_sidecar.security.showing import METHODS, OF_BROKERS, bearer, is_served, token_of, unary, wait_until

MIB = 1024 * 1024
MOST_GROWTH = 64 * MIB
MOST_SLOWED = 5.0
ATTEMPTS = 20
WAIT_SECONDS = LAST_RESORT_SECONDS
VERSION = "/seqdedupe.v1.AdminService/GetVersion"
STREAM = "/seqdedupe.v1.PublishService/PublishStream"
CHECK = "/grpc.health.v1.Health/Check"


PATHS = [f"/{method.containing_service.full_name}/{method.name}" for method in METHODS if is_served(method, "embedded")]
OF_BROKERS_PATHS = [f"/{OF_BROKERS}/{method.name}" for method in METHODS if not is_served(method, "embedded")]


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that wants its token. It refuses any number of calls at once, and holds none."""
    environment = with_constants.environment(connections__UNKNOWN_CALLS=1 << 60)
    folder, module = tmp_path_factory.mktemp("closed"), with_constants.MODULE
    with Sidecar(folder, module=module, environment=environment, authentication="token") as sidecar:
        yield sidecar


class Peak:
    """The most memory that a sidecar has had in a block, above what it had before."""

    def __init__(self, sidecar: Sidecar) -> None:
        self._process = Path(f"/proc/{sidecar.pid}")
        self._before = self._bytes("VmRSS")
        (self._process / "clear_refs").write_text("5")

    def growth(self) -> int:
        return self._bytes("VmHWM") - self._before

    def _bytes(self, name: str) -> int:
        [line] = [line for line in (self._process / "status").read_text().splitlines() if line.startswith(name)]
        return int(line.split()[1]) * 1024


class Innocent:
    """A publisher with a token, one message after the other. `seconds` are what each took, the first `quiet` before
    the block."""

    def __init__(self, sidecar: Sidecar) -> None:
        self.seconds: list[float] = []
        self._sidecar = sidecar
        self._over = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Innocent":
        self._thread.start()
        self.publishes(100)
        self.quiet = len(self.seconds)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def publishes(self, messages: int) -> None:
        """Returns when this many more are stored. Raises what kept it from publishing."""
        wanted, until = len(self.seconds) + messages, time.monotonic() + WAIT_SECONDS
        while len(self.seconds) < wanted and self._failure is None:
            assert time.monotonic() < until
            time.sleep(0.01)
        if self._failure is not None:
            raise self._failure

    def slowed(self) -> float:
        """The 99th percentile of the waits in the block, by that of those before."""
        return p99(self.seconds[self.quiet :]) / p99(self.seconds[: self.quiet])

    def _run(self) -> None:
        try:
            credentials = Credentials(token=token_of(self._sidecar))
            with Client(self._sidecar.address, credentials=credentials) as client, client.producer("t", "p") as one:
                while not self._over.is_set():
                    began = time.monotonic()
                    one.send(b"x" * 100).result(WAIT_SECONDS)
                    self.seconds.append(time.monotonic() - began)
        except BaseException as e:  # noqa: BLE001 (told by the thread that waits)
            self._failure = e


def p99(seconds: list[float]) -> float:
    return sorted(seconds)[int(len(seconds) * 0.99)]


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_callers_do_little_harm(
    closed: Sidecar, kind: str, record_property: Callable[[str, object], None]
) -> None:
    """The sidecar hardly grows, and who publishes hardly notices: what holds the event loop up does so every time, what
    else the machine does now and then."""
    slowed: list[float] = []
    while len(slowed) < ATTEMPTS and min(slowed, default=MOST_SLOWED) >= MOST_SLOWED:
        with Innocent(closed) as innocent:
            peak = Peak(closed)
            # In its own process: threads of this one would hold up the publisher themselves.
            subprocess.run([sys.executable, "-m", hostile_calls.__name__, closed.address, kind, *PATHS], check=True)
            assert peak.growth() < MOST_GROWTH
            innocent.publishes(10)
        slowed.append(round(innocent.slowed(), 2))
    record_property("p99 of the publisher, by that on its own", slowed)
    assert min(slowed) < MOST_SLOWED, slowed
    assert not closed.errors
    assert closed.is_running


def test_the_control_who_publishes_notices_a_sidecar_that_stands_still(closed: Sidecar) -> None:
    with Innocent(closed) as innocent:
        for _ in range(3):
            os.kill(closed.pid, signal.SIGSTOP)
            time.sleep(2 * MOST_SLOWED * p99(innocent.seconds[: innocent.quiet]))
            os.kill(closed.pid, signal.SIGCONT)
            innocent.publishes(2)
    assert innocent.slowed() > MOST_SLOWED


def test_unknown_callers_make_a_brokers_sidecar_hold_little(tmp_path: Path) -> None:
    """A call that only a sidecar for brokers has is no way around."""
    with Sidecar(tmp_path, authentication="token", log="broker") as sidecar:
        for kind in KINDS:
            peak = Peak(sidecar)
            # Most calls of an address with many get no answer, and are not waited for.
            hostile_calls.attack(sidecar.address, kind, OF_BROKERS_PATHS, patience_seconds=0.2)
            assert peak.growth() < MOST_GROWTH, kind
        assert not sidecar.errors
        assert sidecar.is_running


def lenient(folder: Path, **keys: Any) -> Sidecar:
    """A sidecar that asks nobody who they are, and waits for any number of half requests for as long as they take."""
    seconds = (
        "connections.CALL_SECONDS",
        "gate.KNOWN_SECONDS",
        "gate.KNOWN_HURRY_SECONDS",
        "streams.FIRST_MESSAGE_SECONDS",
    )
    limits = {name.replace(".", "__"): 1e6 for name in seconds} | {"connections__MAX_HALF_BYTES": 1 << 40}
    return Sidecar(folder, module=with_constants.MODULE, environment=with_constants.environment(**limits), **keys)


def test_the_control_a_brokers_sidecar_that_asks_nobody_receives_all(tmp_path: Path) -> None:
    with lenient(tmp_path, log="broker") as sidecar, connected(sidecar.address, 1) as [connection]:
        calls = [connection.begin(OF_BROKERS_PATHS[0]) for _ in range(8)]
        sent = [connection.send(call, HALF, patience_seconds=LAST_RESORT_SECONDS) for call in calls]
        assert sum(sent) == 8 * len(HALF)


@pytest.mark.parametrize("path", PATHS)
def test_of_no_call_more_is_taken_than_a_stream_may_have_unread(closed: Sidecar, path: str) -> None:
    with connected(closed.address, 1) as [connection]:
        call = connection.begin(path)
        sent = connection.send(call, HALF)
        assert connection.wait_ended([call], WAIT_SECONDS)
        if "Health" not in path:
            assert sent <= UNREAD_BYTES
        # The connection is as good as before.
        known = connection.begin(VERSION, dict(bearer(token_of(closed))))
        connection.send(known, message(b""), ends=True)
        assert connection.wait_ended([known], WAIT_SECONDS)
        assert not connection.is_closed


@pytest.mark.parametrize("path", [VERSION, "/seqdedupe.v1.ReadService/ReadStream"])
def test_the_control_of_known_callers_all_is_received(tmp_path: Path, path: str) -> None:
    with lenient(tmp_path) as sidecar, connected(sidecar.address, 1) as [connection]:
        peak = Peak(sidecar)
        calls = [connection.begin(path) for _ in range(8)]
        sent = [connection.send(call, HALF, patience_seconds=LAST_RESORT_SECONDS) for call in calls]
        assert sum(sent) == 8 * len(HALF)
        assert peak.growth() > MOST_GROWTH


def test_half_requests_of_one_known_caller_cost_no_more_than_a_few_of_them(tmp_path: Path) -> None:
    """And end, so that its other calls are served."""
    quick = with_constants.environment(gate__KNOWN_HURRY_SECONDS=3.0)
    module = with_constants.MODULE
    with Sidecar(tmp_path, module=module, environment=quick, authentication="token") as sidecar:
        known = dict(bearer(token_of(sidecar)))
        with connected(sidecar.address, 4) as connections:
            peak = Peak(sidecar)
            calls = [(connection, connection.begin(VERSION, known)) for connection in connections for _ in range(10)]
            for connection, call in calls:
                connection.send(call, HALF, patience_seconds=0.1)
            # For each of the others a stream's window.
            assert peak.growth() < KNOWN_AT_ONCE * len(LARGEST) + len(calls) * 2 * UNREAD_BYTES
            last = connections[0].begin(VERSION, known)
            connections[0].send(last, message(b""), ends=True)
            assert connections[0].wait_ended([last], WAIT_SECONDS)
            assert all(connection.wait_ended([call], WAIT_SECONDS) for connection, call in calls)


# -- what gRPC would unpack ----------------------------------------------------------------------------------------


def growth_by_gzip(sidecar: Sidecar, path: str) -> int:
    """By how much the sidecar grows with calls of a known caller that are small until they are unpacked."""
    peak = Peak(sidecar)
    with connected(sidecar.address, 1) as [connection]:
        calls = [connection.begin(path, {"grpc-encoding": "gzip"}) for _ in range(8)]
        for call in calls:
            connection.send(call, message(SMALL_GZIP, compressed=True), ends=True)
        assert connection.wait_ended(calls, WAIT_SECONDS)
    return peak.growth()


@pytest.mark.parametrize("path", [VERSION, STREAM])
def test_nothing_is_unpacked(tmp_path: Path, path: str) -> None:
    with Sidecar(tmp_path) as sidecar:
        assert growth_by_gzip(sidecar, path) < len(LARGEST) // 2
        with grpc.insecure_channel(sidecar.address) as channel, pytest.raises(grpc.RpcError) as e:
            unary(channel, VERSION)(b"", compression=grpc.Compression.Gzip, timeout=TIMEOUT_SECONDS)
        assert e.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "gzip" in str(e.value.details())


@pytest.mark.parametrize("path", [VERSION, STREAM])
def test_the_control_where_compression_is_taken_it_is_unpacked(tmp_path: Path, path: str) -> None:
    environment = with_constants.environment(server___COMPRESSION=["grpc.compression_enabled_algorithms_bitset", 7])
    with Sidecar(tmp_path, module=with_constants.MODULE, environment=environment) as sidecar:
        assert growth_by_gzip(sidecar, path) > len(LARGEST)


# -- health without a token ----------------------------------------------------------------------------------------


@contextmanager
def half_probes(sidecar: Sidecar) -> Iterator[None]:
    """Connections that each have a call for the health of the whole that never comes to its end, again and again."""
    over = threading.Event()

    def keep(connection: RawConnection) -> None:
        while not over.is_set():
            call = connection.begin(CHECK)
            connection.send(call, b"\0")
            while not over.is_set() and call not in connection.ended:
                connection.pump(0.05)

    with connected(sidecar.address) as connections:
        threads = [threading.Thread(target=keep, args=(connection,)) for connection in connections]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


def is_answered(sidecar: Sidecar, seconds: float) -> bool:
    """Whether a probe that calls again when it is refused is answered within this long."""
    until = time.monotonic() + seconds
    with grpc.insecure_channel(sidecar.address) as channel:
        while (left := until - time.monotonic()) > 0:
            try:
                status = health_of(channel).Check(health_pb2.HealthCheckRequest(), timeout=left).status
            except grpc.RpcError:
                time.sleep(0.01)
            else:
                return bool(status == health_pb2.HealthCheckResponse.SERVING)
    return False


def test_a_probe_is_answered_beside_those_that_never_come_to_an_end(closed: Sidecar) -> None:
    with half_probes(closed):
        assert is_answered(closed, WAIT_SECONDS)


def test_the_control_those_that_may_take_for_ever_shut_it_out(tmp_path: Path) -> None:
    forever = with_constants.environment(gate__UNKNOWN_SECONDS=1e6, gate__UNKNOWN_HURRY_SECONDS=1e6)
    module = with_constants.MODULE
    with Sidecar(tmp_path, module=module, environment=forever, authentication="token") as sidecar, half_probes(sidecar):
        wait_until(lambda: not is_answered(sidecar, 3.0))


CROWD = 4
CALLS_OF_CROWD = 15


@contextmanager
def crowding(sidecar: Sidecar) -> Iterator[None]:
    """Connections that keep many calls for the health of the whole open, each without a request. As many of them as
    ever wait have been refused when the block begins."""
    over = threading.Event()
    refused_calls = [0] * CROWD

    def keep(k: int, connection: RawConnection) -> None:
        calls: set[int] = set()
        while not over.is_set():
            refused_calls[k] += len(calls & connection.ended)
            calls -= connection.ended
            calls |= {connection.begin(CHECK) for _ in range(CALLS_OF_CROWD - len(calls))}
            connection.pump(0.01)

    with connected(sidecar.address, CROWD) as connections:
        threads = [threading.Thread(target=keep, args=place) for place in enumerate(connections)]
        for thread in threads:
            thread.start()
        try:
            wait_until(lambda: min(refused_calls) > UNKNOWN_WAITING)
            yield
        finally:
            over.set()
            for thread in threads:
                thread.join()


def test_a_probe_is_answered_the_first_time_beside_a_crowd_of_others(closed: Sidecar) -> None:
    """It is not refused, however many calls a few others have open: its connection has its own place."""
    with crowding(closed):
        for _ in range(20):
            with grpc.insecure_channel(closed.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                answer = health_of(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_SECONDS)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_many_probes_at_once_are_all_answered(closed: Sidecar) -> None:
    with grpc.insecure_channel(closed.address) as channel:
        check: Any = health_of(channel).Check
        calls = [check.future(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_SECONDS) for _ in range(8)]
        assert {call.result().status for call in calls} == {health_pb2.HealthCheckResponse.SERVING}


def test_one_that_is_slow_is_refused_with_a_reason_and_may_call_again(closed: Sidecar) -> None:
    with grpc.insecure_channel(closed.address) as channel:
        hold = threading.Event()

        def nothing() -> Iterator[bytes]:
            hold.wait()
            yield from ()

        call: Any = channel.stream_unary(CHECK)
        answer = refused(lambda: call(nothing(), timeout=TIMEOUT_SECONDS))
        hold.set()
    assert answer.reason == "STREAM_IDLE"
    assert answer.retry_delay_ms > 0


# -- many calls at once ---------------------------------------------------------------------------------------------

FLOODING = 60
"""Connections: fewer than one address may have."""
CALLS_OF_FLOOD = 30
"""On each. They all arrive again after HELD_SECONDS: so few that even a machine ten times slower does not spend all of
its time on them. What is tested is who waits, and not how fast Python is."""
OPEN = "/seqdedupe.v1.PublishService/Open"
MOST_DELAYED = 20.0


def seconds_of_calls(sidecar: Sidecar, count: int = 40) -> float:
    """What a call of a known caller takes, by the median. Every tenth one has a new connection."""
    seconds: list[float] = []
    metadata = bearer(token_of(sidecar))
    while len(seconds) < count:
        with grpc.insecure_channel(sidecar.address, [("grpc.use_local_subchannel_pool", 1)]) as channel:
            for _ in range(10):
                began = time.monotonic()
                unary(channel, VERSION)(b"", metadata=metadata, timeout=WAIT_SECONDS)
                seconds.append(time.monotonic() - began)
    return sorted(seconds)[count // 2]


@contextmanager
def flooding(sidecar: Sidecar, path: str) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-m", flooding_program.__name__, sidecar.address, path]
    command += [str(FLOODING), str(CALLS_OF_FLOOD)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as flood:
        try:
            assert flood.stdout is not None
            assert flood.stdout.readline() == "0\n"
            yield flood
        finally:
            flood.communicate()


@pytest.mark.parametrize("path", [OPEN, CHECK])
def test_a_flood_of_calls_holds_up_no_known_caller(
    tmp_path: Path, path: str, record_property: Callable[[str, object], None]
) -> None:
    """All calls of known callers are answered, over new connections from the same address too, and soon. What floods
    is ended."""
    environment = with_constants.environment(connections__CALL_SECONDS=1e6)
    module = with_constants.MODULE
    with Sidecar(tmp_path, module=module, environment=environment, authentication="token") as sidecar:
        delayed: list[float] = []
        while len(delayed) < ATTEMPTS and min(delayed, default=MOST_DELAYED) >= MOST_DELAYED:
            quiet = seconds_of_calls(sidecar)
            with flooding(sidecar, path) as flood:
                seconds_of_calls(sidecar, 20)
                assert flood.stdout is not None
                assert int(flood.stdout.readline()) > 0
                delayed.append(round(seconds_of_calls(sidecar) / quiet, 2))
                assert is_answered(sidecar, WAIT_SECONDS)
        record_property("median of a call, by that without the flood", delayed)
        assert min(delayed) < MOST_DELAYED, delayed
        assert not sidecar.errors


def test_the_control_where_no_address_is_loud_all_of_a_flood_is_answered(tmp_path: Path) -> None:
    environment = with_constants.environment(connections__CALL_SECONDS=1e6, connections__UNKNOWN_CALLS=1 << 60)
    module = with_constants.MODULE
    with Sidecar(tmp_path, module=module, environment=environment, authentication="token") as sidecar:
        counted = (0, 0)

        def is_over(calls: int, connections: int) -> bool:
            nonlocal counted
            counted = calls, connections
            return calls > 10 * UNKNOWN_CALLS

        hostile_calls.flood(sidecar.address, OPEN, 4, CALLS_OF_FLOOD, is_over)
        assert counted[1] == 0


def test_a_connection_with_a_known_caller_goes_on_beside_a_flood(tmp_path: Path) -> None:
    """As a proxy's may be, over which others call without a token."""
    with (
        Sidecar(tmp_path, authentication="token") as sidecar,
        connected(sidecar.address, 1) as [shared],
        flooding(sidecar, OPEN),
    ):
        for _ in range(5):
            known = shared.begin(VERSION, dict(bearer(token_of(sidecar))))
            shared.send(known, message(b""), ends=True)
            calls = [known, *(shared.begin(OPEN) for _ in range(100))]
            assert shared.wait_ended(calls, WAIT_SECONDS)
        assert not shared.is_closed


# -- a call with one message ---------------------------------------------------------------------------------------


def test_a_call_without_a_request_and_one_with_two(closed: Sidecar) -> None:
    """The first message is the request; what follows it is not received."""
    with grpc.insecure_channel(closed.address) as channel:
        call: Any = channel.stream_unary(VERSION)
        metadata = bearer(token_of(closed))
        answer = refused(lambda: call(iter([]), metadata=metadata, timeout=TIMEOUT_SECONDS))
        assert answer.reason == "MALFORMED_MESSAGE"
        assert call(iter([b"", b"\xff"]), metadata=metadata, timeout=TIMEOUT_SECONDS)


# -- streams of callers who are known --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_bounded", [True, False], ids=["as it is", "control: any amount is held"])
def test_half_messages_on_streams_of_a_known_caller_are_given_up(tmp_path: Path, is_bounded: bool) -> None:
    """gRPC does not say that half of a message has come: what TCP has received, and the sidecar has not, tells it."""
    most = MAX_HALF_BYTES if is_bounded else 1 << 40
    environment = with_constants.environment(connections__MAX_HALF_BYTES=most)
    with (
        Sidecar(tmp_path, module=with_constants.MODULE, environment=environment) as sidecar,
        connected(sidecar.address, 4) as connections,
    ):
        with Client(sidecar.address) as client:
            client.admin.create_topic("t")
        first = message(publish_pb2.PublishStreamRequest(topic="t").SerializeToString())
        *holding, last = connections
        calls = [connection.begin(STREAM) for connection in holding for _ in range(3)]
        peak = Peak(sidecar)
        for connection, call in zip((one for one in holding for _ in range(3)), calls, strict=True):
            connection.send(call, first + HALF, patience_seconds=0.1)
        if is_bounded:
            wait_until(lambda: any(connection.pump(0.05) and connection.is_closed for connection in holding))
        else:
            assert peak.growth() > MAX_HALF_BYTES
        # One that holds less than others goes on.
        call = last.begin(STREAM)
        last.send(call, first + HALF[: 8 * MIB])
        time.sleep(2 * LOOK_SECONDS)
        last.pump(0.1)
        assert not last.is_closed
        assert call not in last.ended
        assert is_bounded or not any(connection.pump(0.05) and connection.is_closed for connection in holding)
