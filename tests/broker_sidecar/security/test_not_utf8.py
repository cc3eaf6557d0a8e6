"""Calls whose method name or metadata is not UTF-8: gRPC's core takes any bytes there."""

import time
from collections.abc import Iterator

import pytest

from broker_sidecar.telemetry import LINES, WINDOW_SECONDS
from seqdedupe.client.blocking import Client
from seqdedupe.client.credentials import Credentials
from seqdedupe.testing import Sidecar
from tests.broker_sidecar.raw_http2 import RawConnection, message
from tests.broker_sidecar.security.showing import token_of, wait_until
from tests.broker_sidecar.security.test_unknown_callers import VERSION, WAIT_SECONDS, Innocent


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar that wants its token, at a port and at a Unix socket."""
    folder = tmp_path_factory.mktemp("closed")
    also = f"unix:{folder}/socket"
    with Sidecar(folder, authentication="token", also_listen=also) as sidecar:
        yield sidecar


def addresses(sidecar: Sidecar) -> tuple[str, str]:
    return sidecar.address, str(sidecar.keys["also_listen"])


def answer(address: str, method: str | bytes, headers: dict[str, str | bytes] | None = None) -> bytes:
    """How a call ends, over its own connection."""
    connection = RawConnection(address)
    try:
        call = connection.begin(method, headers or {})
        connection.send(call, message(b""), ends=True)
        assert connection.wait_ended([call], WAIT_SECONDS)
        return connection.answers[call]
    finally:
        connection.close()


METHODS = (b"/a/c", b"/a\xe9/c", b"/\xff", b"/seqdedupe.v1.AdminService/GetVersion\xff")
"""The first one is the control."""


def test_no_name_of_a_method_ends_the_server(closed: Sidecar) -> None:
    with Innocent(closed) as innocent:
        for address in addresses(closed):
            for method in METHODS:
                assert answer(address, method), method
        innocent.publishes(10)
    closed.check_running()


SPACES = (b"\xa0", b"\xc2\xa0", b"\x85", b"\xe2\x80\xa8")
"""What is white space in Latin-1, and in Unicode."""


def test_a_token_with_other_white_space_is_another_one_and_stands_in_no_log(closed: Sidecar) -> None:
    token = token_of(closed)
    shown = f"Bearer {token}".encode()
    assert b"UNAUTHENTICATED" not in answer(closed.address, VERSION, {"authorization": shown})
    for space in SPACES:
        for bad in (shown + space, b"Bearer " + space + token.encode(), b"Bearer" + space + token.encode()):
            end = answer(closed.address, VERSION, {"authorization": bad})
            assert b"grpc-status\x0216" in end, bad
    wait_until(lambda: any(line["event"].startswith("gRPC reports UnicodeDecodeError at ") for line in closed.log))
    assert token not in f"{closed.log} {closed.errors}"
    with Client(closed.address, credentials=Credentials(token=token)) as client:
        told = client.admin.statistics()
    assert token not in str(told)


def test_metadata_fills_no_log_and_pushes_out_no_warning(closed: Sidecar) -> None:
    before, began = len(closed.log), time.monotonic()
    for _ in range(3 * LINES):
        assert answer(closed.address, VERSION, {"x": b"\xf8" * 15_600, "y": b"\xf8"})
    windows = (time.monotonic() - began) // WINDOW_SECONDS + 2
    wait_until(lambda: any(line["event"].startswith("gRPC reports ") for line in closed.log))
    lines = closed.log[before:]
    assert len(lines) <= windows * (LINES + 1)
    assert all(len(str(line)) < 500 for line in lines)
    with Client(closed.address, credentials=Credentials(token=token_of(closed))) as client:
        kept = client.admin.statistics().warnings
    assert [one.message[:30] for one in kept] == ["messages are kept until the di"]
