"""Calls whose method name or metadata is not UTF-8: gRPC's core takes any bytes there."""

from collections.abc import Iterator

import pytest

from seqdedupe.testing import Sidecar
from tests.broker_sidecar.raw_http2 import RawConnection
from tests.broker_sidecar.security.test_unknown_callers import WAIT_SECONDS, Innocent


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
    """How a call ends, over a connection of its own."""
    connection = RawConnection(address)
    try:
        call = connection.begin(method, headers or {})
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
