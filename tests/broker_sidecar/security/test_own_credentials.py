"""What sidecars show each other, and to whom."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from broker_sidecar.cluster.peers import Neighbours, listed
from broker_sidecar.config import Config, check
from seqdedupe.client import Credentials, UnavailableError
from seqdedupe.client.blocking import Client
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import ConfigurationError, SeqdedupeError
from seqdedupe.testing import Sidecar, reserved_port
from seqdedupe.v1 import admin_pb2
from tests.certificates import Authority
from tests.client.fronts import fronts

TOKEN = "a-t0ken-that-is-long-enough"
SHOWS = Credentials(token=TOKEN)


def test_workers_show_each_other_the_token_of_their_directory(tmp_path: Path) -> None:
    with (
        Sidecar(tmp_path, workers=2, authentication="token") as sidecar,
        Client(sidecar.address, Credentials(token_file=sidecar.token_file)) as client,
    ):
        names = [client.admin.create_topic(f"t{k}").name for k in range(8)]
        assert [topic.name for topic in client.admin.topics()] == names
        assert [one.topics_owned > 0 for one in client.admin.sidecars()] == [True, True]
        # One passes it on to the other.
        client.admin.set_policy("public/default", admin_pb2.TopicPolicy(deduplication_enabled=True))


def two(stack: ExitStack, folder: Path, **keys: Any) -> list[Sidecar]:
    """Two processes with their own directories that share the topics, as on two machines."""
    ports = [stack.enter_context(reserved_port()) for _ in range(2)]
    addresses = ["{}:{}".format(*port.getsockname()) for port in ports]
    both = []
    for k, shards in enumerate(["0-31", "32-63"]):
        keys |= {"shards": shards, "cluster_id": "c", "peers": ",".join(addresses), "listen": addresses[k]}
        both.append(Sidecar(folder / str(k), authentication="token", **keys))
        both[k].data.mkdir(parents=True)
        (both[k].data / "token").write_text(TOKEN if k else TOKEN[::-1])
        (both[k].data / "token").chmod(0o600)
        both[k].spawn()
        stack.callback(both[k].kill)
    for one in both:
        one.wait_until_serving()
    return both


def test_without_a_token_for_others_half_of_the_topics_is_an_error(tmp_path: Path) -> None:
    with ExitStack() as stack:
        one, _ = two(stack, tmp_path)
        client = stack.enter_context(Client(one.address, Credentials(token_file=one.token_file)))
        with pytest.raises(UnavailableError, match="the call shows no token") as e:
            client.admin.topics()
    assert e.value.reason == "SHARDS_INCOMPLETE"
    assert TOKEN[::-1] not in str(e.value)


def test_over_machines_it_is_a_token_that_both_take_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    own = authority.issue("sidecar", "127.0.0.1")
    (tmp_path / "peers").write_text(TOKEN)
    keys = {
        "peer_token_file": tmp_path / "peers",
        "tls_certificate_file": own.certificate_file,
        "tls_key_file": own.key_file,
        "peer_tls_ca_file": authority.ca_file,
    }
    with ExitStack() as stack:
        first, second = two(stack, tmp_path, **keys)
        # The first takes another token, and asks the second with that of the file.
        client = stack.enter_context(Client(first.address, Credentials(None, first.token_file, authority.ca_file)))
        assert client.admin.topics() == []
        client = stack.enter_context(Client(second.address, Credentials(TOKEN, None, authority.ca_file)))
        with pytest.raises(UnavailableError, match="not this sidecar's"):
            client.admin.topics()


async def test_who_is_not_listed_is_shown_no_token(shared_sidecar: Sidecar) -> None:
    async with fronts(shared_sidecar.address, 2) as (known, other):
        for among in (Sidecars.parse(known.address, SHOWS), None):
            for front in (known, other):
                assert await Neighbours(among).instance_name(front.address) is not None
                assert await Neighbours(among).answers(front.address)
        with pytest.raises(SeqdedupeError, match="is not asked"):
            await Neighbours(Sidecars.parse(known.address, SHOWS)).snapshot_of(other.address, "t")
        assert set(other.shown) == {None}
        assert known.shown == [f"Bearer {TOKEN}"] * 2 + [None] * 2


def test_a_directory_that_is_not_split_keeps_its_token_for_itself(tmp_path: Path) -> None:
    config = Config(data_directory=str(tmp_path), authentication="token", peers="127.0.0.1:1")
    found = listed(config)
    assert found is not None
    assert found.credentials == Credentials()


@pytest.mark.parametrize(
    "keys",
    [
        {"peer_token_file": "nowhere", "peers": "127.0.0.1:1"},
        {"tls_certificate_file": "nowhere", "tls_key_file": "nowhere", "peers": "127.0.0.1:6660"},
    ],
)
def test_a_file_that_cannot_be_read_is_an_error_at_the_start(tmp_path: Path, keys: dict[str, Any]) -> None:
    config = Config(data_directory=str(tmp_path), **keys)
    with pytest.raises(ConfigurationError, match="'nowhere' cannot be read") as e:
        listed(config)
    assert e.value.reason == "INVALID_CONFIGURATION"


def test_a_token_for_nobody_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="peer_token_file"):
        check(Config(data_directory=str(tmp_path), peer_token_file="token"))
