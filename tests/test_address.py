"""Addresses of sidecars: what is one, what is none, and that they are printed as they are read."""

import pytest

from seqdedupe.address import SidecarAddress
from seqdedupe.errors import ConfigurationError

GOOD = {
    "127.0.0.1:6660": SidecarAddress("127.0.0.1", 6660),
    "localhost:0": SidecarAddress("localhost", 0),
    "[::1]:65535": SidecarAddress("[::1]", 65_535),
    "sidecar.example.org:1": SidecarAddress("sidecar.example.org", 1),
    "*:1": SidecarAddress("*", 1),
    "unix:/run/a b.sock": SidecarAddress(path="/run/a b.sock"),
    "unix:x.sock": SidecarAddress(path="x.sock"),
}


@pytest.mark.parametrize("text", GOOD)
def test_an_address_is_printed_as_it_is_read(text: str) -> None:
    assert SidecarAddress.parse(text) == GOOD[text]
    assert str(GOOD[text]) == text


def test_an_absolute_path_as_grpc_writes_it() -> None:
    assert SidecarAddress.parse("unix:///run/x.sock") == SidecarAddress(path="/run/x.sock")


BAD = [
    *("", "host", ":1", "host:", "host:x", "host:-1", "host:65536", "host:²", "host:1:2", "::1", "::1:6660"),
    *("[::1]", "unix:", "unix:/", "unix:///", "http://host:1", "dns:///host:1", "a/b:1"),
]


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_address_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ConfigurationError) as e:
        SidecarAddress.parse(text)
    assert e.value.reason == "INVALID_ADDRESS"
    assert repr(text) in e.value.message


@pytest.mark.parametrize(
    ("text", "is_local"),
    [
        *((text, True) for text in ("127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1", "unix:x")),
        *((text, False) for text in ("0.0.0.0:1", "[::]:1", "10.0.0.1:1", "example.org:1", "*:1")),
    ],
)
def test_who_can_be_reached_from_other_machines(text: str, is_local: bool) -> None:
    assert SidecarAddress.parse(text).is_local is is_local


EVERYWHERE = [
    *("0.0.0.0", "0", "0.0", "00.0.0.0", "0x0", "[::]", "[::0]", "[0:0::0.0.0.0]", "[::ffff:0.0.0.0]", "[::%lo]"),
    *("*", "[]", "[0.0.0.0]"),
]
SOMEWHERE = ["127.0.0.1", "1", "0.0.0.1", "[::1]", "[::ffff:10.0.0.1]", "localhost", "0.example.org", "x" * 70]


@pytest.mark.parametrize(
    "text", [*(f"{host}:1" for host in EVERYWHERE), *(f"{host}:1" for host in SOMEWHERE), "unix:x"]
)
def test_an_address_to_which_no_client_connects_is_known_in_every_spelling(text: str) -> None:
    assert SidecarAddress.parse(text).is_everywhere is (text.removesuffix(":1") in EVERYWHERE)
