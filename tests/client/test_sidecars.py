"""The list of addresses: what is one, what is none, and where a sidecar may send a client."""

import pytest

from seqdedupe.address import SidecarAddress
from seqdedupe.client import Client, blocking
from seqdedupe.client.route import Addresses, Sidecars
from seqdedupe.errors import ConfigurationError

GOOD: list[tuple[Addresses, str]] = [
    ("127.0.0.1:6660", "127.0.0.1:6660"),
    ("a:1,b:2", "a:1,b:2"),
    (" a:1 , b:2 ", "a:1,b:2"),
    (["a:1", "b:2"], "a:1,b:2"),
    (("a:1",), "a:1"),
    ("a:1,b:2,a:1", "a:1,b:2"),
    ("Host.Example.org:1,host.example.ORG:1", "host.example.org:1"),
    ("a:1,a:2", "a:1,a:2"),
    ("unix:/run/x.sock,unix:///run/x.sock,[::1]:6660", "unix:/run/x.sock,[::1]:6660"),
    (["unix:/run/a,b.sock"], "unix:/run/a,b.sock"),
    ("a:1,*.Example.org", "a:1,*.example.org"),
    ("*.svc,a:1,*.svc", "a:1,*.svc"),
]


@pytest.mark.parametrize(("given", "printed"), GOOD)
def test_a_list_is_read(given: Addresses, printed: str) -> None:
    sidecars = Sidecars.parse(given)
    assert str(sidecars) == printed
    assert Sidecars.parse(list(map(str, sidecars.addresses))).addresses == sidecars.addresses
    assert Client(given).address == blocking.Client(given).address == (given if isinstance(given, str) else printed)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        *(("", "''"), (",", "''"), ("a:1,", "''"), ("a:1,,b:2", "''"), ("a:1;b:2", "'a:1;b:2'"), ([], "[]")),
        *(("a:1,http://b:2", "'http://b:2'"), ("a:1,b", "'b'"), ("a:1 b:2", "'a:1 b:2'"), (["a:1,b:2"], "'a:1,b:2'")),
        *(
            ("*.example.org", "'*.example.org'"),
            ("a:1,*", "'*'"),
            ("a:1,*.", "'*.'"),
            ("a:1,*.example.org:1", "'*.exa"),
        ),
        *(
            ("a:1,*.0.0.1", "'*.0.0.1'"),
            ("a:1,*..org", "'*..org'"),
            ("a:1,*.a/b", "'*.a/b'"),
            ("a:1,*.org.", "'*.org.'"),
        ),
    ],
)
def test_what_is_wrong_in_a_list_is_named(given: Addresses, named: str) -> None:
    for make in (Sidecars.parse, Client, blocking.Client):
        with pytest.raises(ConfigurationError) as caught:
            make(given)
        assert caught.value.reason == "INVALID_ADDRESS"
        assert named in caught.value.message


def test_without_a_topic_the_order_is_that_of_the_list() -> None:
    addresses = [f"10.0.0.{number}:6660" for number in range(9, 0, -1)]
    assert list(map(str, Sidecars.parse(addresses).in_order(""))) == addresses


SIDECARS = Sidecars.parse("10.0.0.1:6660,unix:/run/x.sock,*.sidecars.example.org,*.svc")


@pytest.mark.parametrize(
    "text",
    ["10.0.0.1:6660", "unix:/run/x.sock", "s-0.sidecars.example.org:1", "S-0.Sidecars.Example.org:6660", "a.b_c.svc:9"],
)
def test_where_a_client_may_be_sent(text: str) -> None:
    assert SIDECARS.allowed(text) == SidecarAddress.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "10.0.0.1",
            "10.0.0.1:6661",
            "10.0.0.2:6660",
            "unix:/run/y.sock",
            "nonsense",
            "http://10.0.0.1:6660",
        ),
        *(
            "sidecars.example.org:1",
            "notsidecars.example.org:1",
            "s.sidecars.example.org.evil.org:1",
            "svc:1",
            ".svc:1",
        ),
        *("evil.org#.svc:1", "evil.org?.svc:1", "evil.org/.svc:1", "evil.org:1/.svc:1", "evil.org\\.svc:1"),
        *("evil.org\n.svc:1", "evil.org\0.svc:1", "evil.org %.svc:1", "a@.svc:1", "evil.org%23.svc:1", "a..svc:1"),
        *("[::1].svc:1", "s.svc.:1", "s.svc", "s.svc:x", "dns:///s.svc:1", "ipv4:1.2.3.4,s.svc:1", "é.svc:1"),
    ],
)
def test_where_it_may_not(text: str) -> None:
    assert SIDECARS.allowed(text) is None
    assert Sidecars.parse("10.9.9.9:1").allowed(text) is None
