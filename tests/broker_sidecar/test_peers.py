"""Who the other processes are, asked by several at once while a process does not know its own address yet."""

import asyncio

import pytest

from broker_sidecar.cluster.peers import Neighbours, Peers
from seqdedupe.client.route import Sidecars
from seqdedupe.names import from_text
from seqdedupe.store.directories import Claim
from seqdedupe.v1 import admin_pb2

OWN, OTHER = "127.0.0.1:1", "127.0.0.1:2"


async def test_all_who_ask_at_once_are_told_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = Peers(Claim("c", from_text("0-31")), Sidecars.parse([OWN, OTHER]))
    answers = {
        OWN: admin_pb2.GetShardsResponse(process_id=peers.process_id, shards="0-31", cluster_id="c"),
        OTHER: admin_pb2.GetShardsResponse(process_id="other", shards="32-63", cluster_id="c"),
    }

    async def shards(_: Neighbours, address: str) -> admin_pb2.GetShardsResponse:
        await asyncio.sleep(0)
        return answers[address]

    monkeypatch.setattr(Neighbours, "shards", shards)
    found = await asyncio.gather(*(peers.all_others() for _ in range(3)))
    assert [list(one) for one in found] == [[OTHER]] * 3
    assert peers.own_address == OWN
