"""The order in which a topic's sidecars are tried: that it is the documented one, that topics spread, and stay."""

import random
import re
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from seqdedupe.client.route import in_order

ROOT = Path(__file__).parent.parent
PROTO = ROOT / "proto" / "seqdedupe" / "v1" / "publish.proto"

# What coreutils' sha256sum says of topic, line feed and address.
WEIGHTS = {
    ("persistent://public/default/orders", "10.0.0.1:6660"): 0x98ADC381F88B0347,
    ("persistent://public/default/orders", "10.0.0.2:6660"): 0x20A9731EC84C5929,
    ("persistent://public/default/orders", "10.0.0.3:6660"): 0x9492C9244BA72B56,
    ("persistent://public/default/orders-partition-0", "10.0.0.1:6660"): 0xAC43603A66A21FEE,
    ("persistent://shop/eu/order-events", "[2001:db8::1]:6660"): 0x9C429823CEDC1D64,
    ("persistent://shop/eu/order-events", "sidecar-0.sidecars.example.org:6660"): 0x38944F7B09E151E5,
    ("persistent://shop/eu/order-events", "unix:/run/seqdedupe.sock"): 0x5A883097FE1E6376,
}

TOPICS = [f"persistent://public/default/topic-{number}" for number in range(300)]
CLUSTERS = [
    ["10.0.0.1:6660", "10.0.0.2:6660", "10.0.0.3:6660"],
    ["127.0.0.1:6661", "127.0.0.1:6662", "127.0.0.1:6663"],
    [f"seqdedupe-{number}.seqdedupe.default.svc.cluster.local:6660" for number in range(3)],
]


def test_the_vectors_that_are_published() -> None:
    vectors = re.findall(r'"(persistent://.+?)" +"(.+?)" +([0-9a-f]{16})$', PROTO.read_text(), re.MULTILINE)
    assert {(topic, address): int(weight, 16) for topic, address, weight in vectors} == WEIGHTS


@pytest.mark.parametrize("topic", sorted({topic for topic, _ in WEIGHTS}))
def test_the_highest_weight_comes_first(topic: str) -> None:
    weights = {address: weight for (named, address), weight in WEIGHTS.items() if named == topic}
    assert in_order(topic, weights) == sorted(weights, key=weights.__getitem__, reverse=True)


@pytest.mark.parametrize("addresses", CLUSTERS)
def test_the_order_of_the_list_does_not_matter(addresses: list[str]) -> None:
    for topic in TOPICS:
        shuffled = random.Random(topic).sample(addresses, len(addresses))
        assert in_order(topic, shuffled) == in_order(topic, addresses)


@pytest.mark.parametrize("addresses", CLUSTERS)
def test_topics_spread(addresses: list[str]) -> None:
    """Over who is first, and over who comes after a first one that has died."""
    firsts = Counter(in_order(topic, addresses)[0] for topic in TOPICS)
    assert max(firsts.values()) <= 0.45 * len(TOPICS)
    for dead in addresses:
        heirs = Counter(order[1] for topic in TOPICS if (order := in_order(topic, addresses))[0] == dead)
        assert len(heirs) == 2
        assert max(heirs.values()) <= 0.70 * heirs.total()


@pytest.mark.parametrize("addresses", CLUSTERS)
def test_one_more_takes_its_share_and_moves_nothing_else(addresses: list[str]) -> None:
    new = "10.9.9.9:6660"
    moved = 0
    for topic in TOPICS:
        before, after = in_order(topic, addresses), in_order(topic, [*addresses, new])
        assert [address for address in after if address != new] == before
        moved += after[0] == new
    assert 0.15 * len(TOPICS) < moved < 0.35 * len(TOPICS)


def test_a_hash_modulo_the_number_would_move_most_topics() -> None:
    """The control arm of the test before: what a simpler way does."""

    def number(topic: str, count: int) -> int:
        return int.from_bytes(sha256(topic.encode()).digest()[:8]) % count

    moved = sum(number(topic, 3) != number(topic, 4) for topic in TOPICS)
    assert moved > 0.6 * len(TOPICS)
