"""The processes that have a cluster's shards among them: who has a topic, and what all of them say together."""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterable
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

from broker_sidecar.config import Config
from broker_sidecar.neighbours import Neighbours
from seqdedupe.client.sidecars import Sidecars
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.shards import from_text, shard_of, to_text
from seqdedupe.store.directories import Claim, check_once, read_claim, unclaimed
from seqdedupe.topic.ownership import Ownership
from seqdedupe.v1 import admin_pb2

logger = logging.getLogger("seqdedupe.server")

LOOK_SECONDS = 5.0
"""So often the others are asked what they claim."""
FIRST_LOOK_SECONDS = 0.2
"""The same while it is not known who has each shard."""

THIS = "this process"

R = TypeVar("R", admin_pb2.SetNamespacePolicyResponse, admin_pb2.RemoveNamespacePolicyResponse)


def claim_of(config: Config) -> tuple[Claim | None, bool]:
    """What the data directory claims, or is to claim; and whether it says so already.

    Raises INVALID_CONFIGURATION if the configuration says something else, STORE_DAMAGED, NEWER_FORMAT; OSError.
    """
    said = read_claim(Path(config.data_directory))
    wanted = from_text(config.shards) if config.shards else None
    if said is None:
        return (Claim(config.cluster_id, wanted) if wanted is not None else None), False
    keeps = "a data directory keeps its shards and its cluster for good"
    if wanted not in (None, said.shards):
        why = f"shards is {config.shards!r}, but the data directory has {to_text(said.shards)}: {keeps}"
        raise error("INVALID_CONFIGURATION", why, key="shards")
    if config.cluster_id not in ("", said.cluster_id):
        why = f"cluster_id is {config.cluster_id!r}, but the data directory is of {said.cluster_id!r}: {keeps}"
        raise error("INVALID_CONFIGURATION", why, key="cluster_id")
    return said, True


class Peers(Ownership):
    """What this process claims, and what those at `addresses`, of which it may be one, say that they claim."""

    def __init__(self, claim: Claim, addresses: Sidecars | None) -> None:
        self.claim = claim
        self._neighbours = Neighbours(addresses)
        self.process_id = secrets.token_hex(8)
        self.own_address = ""
        """At which the others reach this process."""
        self._addresses = [str(address) for address in addresses.addresses] if addresses else []
        self._known: dict[str, Claim] = {}
        """What others claimed when they were asked last, by address."""
        self._one_at_a_time = asyncio.Lock()

    # -- whose a topic is --------------------------------------------------------------------------------------

    def check(self, topic: str) -> None:
        """Raises NOT_OWNER with the owner's address, where it is known; SHARD_CLAIMED_TWICE if there are two."""
        shard = shard_of(topic)
        if shard in self.claim.shards:
            return
        owners = [address for address, claim in self._known.items() if shard in claim.shards]
        if len(owners) > 1:
            raise error("SHARD_CLAIMED_TWICE", f"{' and '.join(owners)} both claim shard {shard}, that of {topic}")
        owner = owners[0] if owners else ""
        where = f"at {owner}" if owner else "which was not found yet"
        raise error("NOT_OWNER", f"{topic} is of shard {shard}: another process has it, {where}", owner_address=owner)

    def check_found(self, topics: Iterable[str]) -> None:
        for topic in topics:
            if (shard := shard_of(topic)) not in self.claim.shards:
                raise error(
                    "SHARD_CLAIMED_TWICE",
                    f"the data directory has the topic {topic}, which is of shard {shard}: its shards are "
                    f"{to_text(self.claim.shards)}",
                    shard=shard,
                )

    def missing(self, topic: str) -> SeqdedupeError:
        # With its shard: who has it knows for sure, and nobody else need be asked.
        return error("TOPIC_NOT_FOUND", f"there is no topic {topic}", topic=topic, shard=shard_of(topic))

    # -- who the others are ------------------------------------------------------------------------------------

    async def look(self) -> None:
        """Asks the others; those that do not answer are as they were known. Raises SHARD_CLAIMED_TWICE if one of them
        claims a shard that is claimed here, INVALID_CONFIGURATION if one is of another cluster."""
        answers = await self._ask()
        for address, answer in answers.items():
            if not isinstance(answer, SeqdedupeError):
                self._known[address] = _claim_in(answer)
        for address, claim in self._known.items():
            check_once({THIS: self.claim, address: claim})

    async def keep_looking(self, fatal: Callable[[str], None]) -> None:
        """`look` again and again. What it raises is fatal: there is no telling who is right."""
        while True:
            await asyncio.sleep(FIRST_LOOK_SECONDS if unclaimed({THIS: self.claim, **self._known}) else LOOK_SECONDS)
            try:
                await self.look()
            except SeqdedupeError as e:
                fatal(f"{e} {e.hint}")

    async def _ask(self) -> dict[str, admin_pb2.GetShardsResponse | SeqdedupeError]:
        """What the others answer, by address, each of them once; this process is not among them."""
        # Somebody else who asks may find this process's own address meanwhile.
        others = [address for address in self._addresses if address != self.own_address]
        asked = await asyncio.gather(*map(self._neighbours.shards, others), return_exceptions=True)
        found: dict[str, admin_pb2.GetShardsResponse | SeqdedupeError] = {}
        processes = {self.process_id}
        for address, answer in zip(others, asked, strict=True):
            if isinstance(answer, SeqdedupeError):
                found[address] = answer
            elif isinstance(answer, BaseException):
                raise answer
            elif answer.process_id == self.process_id:
                self.own_address = address
            elif answer.process_id not in processes:
                processes.add(answer.process_id)
                found[address] = answer
        return found

    async def all_others(self) -> dict[str, admin_pb2.GetShardsResponse]:
        """What the others answer, by address: they have all shards that this one has not.

        Raises SHARDS_INCOMPLETE if some do not answer or are not there, SHARD_CLAIMED_TWICE, INVALID_CONFIGURATION.
        """
        answers = await self._ask()
        there = {address: one for address, one in answers.items() if not isinstance(one, SeqdedupeError)}
        claims = {THIS: self.claim} | {address: _claim_in(answer) for address, answer in there.items()}
        check_once(claims)
        if lacking := unclaimed(claims):
            silent = [f"{address}: {one}" for address, one in answers.items() if isinstance(one, SeqdedupeError)]
            who = f"who has the shards {to_text(lacking)} does not answer, or is none of the peers"
            raise error("SHARDS_INCOMPLETE", "; ".join([who, *silent]), shards=to_text(lacking))
        return there

    # -- what all of them say together ----------------------------------------------------------------------------

    async def list_topics(
        self, after: str, here: admin_pb2.ListTopicsResponse, page_items: int
    ) -> admin_pb2.ListTopicsResponse:
        """A page of the topics of all, of which `here` is what this one has. Raises as `all_others`, UNREACHABLE."""
        others = await self.all_others()
        pages = [here, *await asyncio.gather(*(self._neighbours.topics(address, after) for address in others))]
        topics = sorted((topic for page in pages for topic in page.topics), key=attrgetter("name"))
        is_last = len(topics) <= page_items and not any(page.next for page in pages)
        topics = topics[:page_items]
        return admin_pb2.ListTopicsResponse(topics=topics, next="" if is_last else topics[-1].name)

    async def list_sidecars(self, topics: int) -> list[admin_pb2.ClusterSidecar]:
        """All of them by address; this one has so many topics. Raises as `all_others`."""
        found = [_sidecar(address, one.shards, one.topics) for address, one in (await self.all_others()).items()]
        found.append(_sidecar(self.own_address, to_text(self.claim.shards), topics))
        found[-1].is_this = True
        return sorted(found, key=attrgetter("name"))

    async def are_serving(self) -> bool:
        """Whether all others serve."""
        try:
            return all(one.is_serving for one in (await self.all_others()).values())
        except SeqdedupeError:
            return False

    async def everywhere(self, name: str, request: Any, here: Callable[[Any], Awaitable[R]]) -> R:
        """Makes a call about a namespace at all others, and last here, where it can be asked for.

        Raises NOT_OWNER with the address of the one that is to be asked, so that two changes never cross; as
        `all_others`: then nothing has changed; and what one of them says: then some have it, and doing it again helps.
        """
        self.check(request.namespace)
        async with self._one_at_a_time:
            others = await self.all_others()
            request.only_here = True
            for address in others:
                await self._neighbours.ask(address, name, request)
            return await here(request)


def _claim_in(answer: admin_pb2.GetShardsResponse) -> Claim:
    return Claim(answer.cluster_id, from_text(answer.shards))


def _sidecar(address: str, shards: str, topics: int) -> admin_pb2.ClusterSidecar:
    return admin_pb2.ClusterSidecar(name=address, addresses=[address], shards=shards, topics_owned=topics)
