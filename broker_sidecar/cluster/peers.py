"""The processes among which a cluster's shards are divided. This module determines which process owns a topic, and
combines the answers of all processes.

`Neighbours` makes the calls to other sidecars, with or without shards, with the credentials that `listed` returns.
`Peers` knows which process has which shard.
"""

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from broker_sidecar.config import Config
from broker_sidecar.rpc import columns
from broker_sidecar.security import tokens
from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import answer_of, new_channel, typed_errors
from seqdedupe.client.credentials import NO_CREDENTIALS, SIDECAR_USER, Credentials
from seqdedupe.client.listeners import is_of_tls
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.names import from_text, shard_of, to_text
from seqdedupe.store.directories import Claim, check_once, read_claim, unclaimed, whole_of
from seqdedupe.store.snapshots import Loaded
from seqdedupe.topic.registry import Ownership
from seqdedupe.transfer.topic_state import SnapshotReader
from seqdedupe.v1 import admin_pb2
from seqdedupe.v1.admin_pb2_grpc import AdminServiceStub

logger = logging.getLogger("seqdedupe.server")

# -- The credentials that this sidecar shows to others.


def listed(config: Config) -> Sidecars | None:
    """Return the sidecars listed in `peers`, with the credentials that this sidecar presents to them; None if none are
    listed.

    Raises INVALID_CONFIGURATION for files that cannot be read.
    """
    try:
        return Sidecars.parse(config.peers, _credentials(config)) if config.peers else None
    except SeqdedupeError as e:
        raise error("INVALID_CONFIGURATION", f"the credentials for other sidecars: {e.message}", hint=e.hint) from e


def _credentials(config: Config) -> Credentials:
    """Return the credentials, including the token of `peer_token_file`. Workers of the same data directory use that
    directory's token."""
    token_file: str | Path | None = config.peer_token_file or None
    folder = Path(config.data_directory)
    if token_file is None and config.authentication == "token" and whole_of(folder) is not None:
        token_file = tokens.make(folder)
    has_tls = bool(config.tls_certificate_file)
    return Credentials(
        token_file=token_file,
        tls_ca_file=(config.peer_tls_ca_file or config.tls_client_ca_file or None) if has_tls else None,
        tls_certificate_file=config.tls_certificate_file or None,
        tls_key_file=config.tls_key_file or None,
        allow_insecure_token=config.allow_insecure_listen,
        sidecar_user=os.environ.get(SIDECAR_USER) or None,
    )


# -- The calls to other sidecars.

ANSWER_SECONDS = 5.0
OF_ALL_SECONDS = 12.0
"""The time limit for answers that need all processes. The caller waits for half a minute."""
TAKE_SECONDS = 15.0
"""The time to take over a topic: a part of it may have to be read."""
SILENT_SECONDS = 30.0
"""The maximum pause between two parts of a snapshot."""
TURN_SECONDS = 180.0
"""The maximum wait for the first part of a snapshot. The owner waits until few exports run and memory is free, and
copies the whole snapshot before it sends the first part."""

_NO_ANSWER = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_EXPORT = "/seqdedupe.v1.AdminService/ExportSnapshot"


class Neighbours:
    """The calls to other sidecars. This sidecar presents its token and certificate only to listed sidecars."""

    def __init__(self, listed: Sidecars | None = None) -> None:
        """`listed` contains the listed sidecars. None means that no sidecar is listed, and that every owner is accepted
        as a sidecar."""
        self._listed = listed
        self._for_others = replace(listed.credentials, token=None, token_file=None) if listed else NO_CREDENTIALS

    def allowed(self, address: str) -> SidecarAddress | None:
        """Return the address if it is listed, or in a listed domain; otherwise None."""
        return self._listed.allowed(address) if self._listed else None

    def _channel(self, address: SidecarAddress, *, is_one: bool = True) -> grpc.aio.Channel:
        listed = self._listed.allowed(str(address)) if self._listed else None
        credentials = self._listed.credentials if self._listed and listed else self._for_others
        return new_channel(address, credentials, is_one=is_one)

    async def answers(self, address: str) -> bool:
        """Return whether the sidecar at this address gives any answer.

        A sidecar that has stopped, or whose event loop is blocked, gives no answer. A failed TLS handshake counts as an
        answer.
        """
        async with self._channel(SidecarAddress.parse(address)) as channel:
            try:
                health: Any = health_pb2_grpc.HealthStub(channel)
                await health.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
            except grpc.aio.AioRpcError as e:
                return e.code() not in _NO_ANSWER or is_of_tls(e.details() or "")
            return True

    async def shards(self, address: str) -> admin_pb2.GetShardsResponse:
        """Return the claim of the process at this address. Raises UNREACHABLE; INVALID_REQUEST if the process has no
        shards."""
        request = admin_pb2.GetShardsRequest()
        claimed: admin_pb2.GetShardsResponse = await self.ask(address, "GetShards", request, OF_ALL_SECONDS)
        return claimed

    async def topics(self, address: str, after: str) -> admin_pb2.ListTopicsResponse:
        """Return a page of the topics that belong to the process at this address. Raises UNREACHABLE."""
        request = admin_pb2.ListTopicsRequest(after=after, only_here=True)
        page: admin_pb2.ListTopicsResponse = await self.ask(address, "ListTopics", request, OF_ALL_SECONDS)
        return page

    async def instance_name(self, address: str) -> str | None:
        """Return the instance name of the sidecar at this address; None if no sidecar answers there."""
        try:
            return (await self.version(address)).instance_name
        except SeqdedupeError:
            return None

    async def version(self, address: str) -> admin_pb2.GetVersionResponse:
        """Return the version and other facts that the sidecar at this address reports. Raises the errors of `ask`."""
        version: admin_pb2.GetVersionResponse = await self.ask(address, "GetVersion", admin_pb2.GetVersionRequest())
        return version

    async def door_at(self, address: str) -> str:
        """Return the URL of the door for Pulsar clients of the sidecar at this address; empty if the sidecar has no
        door. Raises the errors of `ask`.

        Only listed sidecars are asked, because clients send their tokens to the returned address.
        """
        return (await self.version(address)).pulsar_url if self.allowed(address) is not None else ""

    async def topic(self, address: str, name: str) -> admin_pb2.Topic:
        """Return the description of a topic from the sidecar at this address. Raises that sidecar's refusal,
        UNREACHABLE."""
        found: admin_pb2.Topic = (await self.ask(address, "GetTopic", admin_pb2.GetTopicRequest(topic=name))).topic
        return found

    async def take(self, address: str, name: str) -> None:
        """Make the sidecar at this address take over the topic. When this returns, that sidecar serves the topic.
        Raises the errors of `topic`, NOT_OWNER."""
        await self.ask(address, "TakeTopic", admin_pb2.TakeTopicRequest(topic=name), TAKE_SECONDS)

    @asynccontextmanager
    async def giving(self, address: str) -> AsyncIterator[Any]:
        """Yield a call of ReceiveTopic to the sidecar at this address, which ends with the block.

        Raises that sidecar's refusal, UNREACHABLE."""
        there = SidecarAddress.parse(address)
        async with self._channel(there) as channel:
            with typed_errors(there):
                call: Any = AdminServiceStub(channel).ReceiveTopic()
                try:
                    yield call
                finally:
                    call.cancel()

    async def ask(self, address: str, name: str, request: Message, timeout_seconds: float = ANSWER_SECONDS) -> Any:
        """Return the answer of the sidecar at this address to a call of AdminService. Raises that sidecar's refusal,
        UNREACHABLE, NOT_A_SIDECAR."""
        there = SidecarAddress.parse(address)
        async with self._channel(there) as channel:
            with typed_errors(there):
                return await answer_of(channel, getattr(AdminServiceStub(channel), name), request, timeout_seconds)

    async def snapshot_of(self, address: str, topic: str) -> tuple[int, Loaded]:
        """Return the incarnation and the current snapshot of a topic, from the topic's owner.

        If sidecars are listed, the owner must be a listed sidecar, or in a listed domain. Otherwise this raises
        INVALID_ADDRESS. Raises UNREACHABLE, OUTCOME_UNKNOWN if the call breaks, the owner's refusal, and the errors of
        `SnapshotReader`.
        """
        owner = SidecarAddress.parse(address) if self._listed is None else self._listed.allowed(address)
        if owner is None:
            raise error("INVALID_ADDRESS", f"{address!r} is not one of the peers {self._listed}, so it is not asked")
        reader = SnapshotReader()
        async with self._channel(owner, is_one=False) as channel:
            call: Any = channel.unary_stream(_EXPORT, admin_pb2.ExportSnapshotRequest.SerializeToString)
            with typed_errors(owner):
                coming = call(admin_pb2.ExportSnapshotRequest(topic=topic))
                data = await _next(coming, owner, TURN_SECONDS)
                while data is not grpc.aio.EOF:
                    reader.add(columns(admin_pb2.ExportSnapshotResponse, data).part)
                    data = await _next(coming, owner, SILENT_SECONDS)
        head, loaded = reader.finish()
        if head.topic != topic:
            raise error("INVALID_REQUEST", f"{owner} answered with a snapshot of {head.topic}, not of {topic}")
        return head.position.incarnation, loaded


async def _next(coming: Any, owner: SidecarAddress, seconds: float) -> Any:
    try:
        async with asyncio.timeout(seconds):
            return await coming.read()
    except TimeoutError as e:
        raise error("UNREACHABLE", f"the sidecar at {owner} sent nothing for {seconds:.0f} s") from e


LOOK_SECONDS = 5.0
"""The interval at which the other processes are asked for their claims."""
FIRST_LOOK_SECONDS = 0.2
"""The interval while the process of some shard is unknown."""

THIS = "this process"

R = TypeVar("R", admin_pb2.SetNamespacePolicyResponse, admin_pb2.RemoveNamespacePolicyResponse)


def claim_of(config: Config) -> tuple[Claim | None, bool]:
    """Return the current or future claim of the data directory, and whether the claim is already recorded there.

    Raises INVALID_CONFIGURATION if the configuration differs from the recorded claim, STORE_DAMAGED, NEWER_FORMAT,
    OSError.
    """
    said = read_claim(Path(config.data_directory))
    wanted = from_text(config.shards) if config.shards else None
    if said is None:
        return (Claim(config.cluster_id, wanted) if wanted is not None else None), False
    keeps = "the shards and the cluster of a data directory cannot be changed"
    if wanted not in (None, said.shards):
        why = f"shards is {config.shards!r}, but the data directory has {to_text(said.shards)}: {keeps}"
        raise error("INVALID_CONFIGURATION", why, key="shards")
    if config.cluster_id not in ("", said.cluster_id):
        why = f"cluster_id is {config.cluster_id!r}, but the data directory is of {said.cluster_id!r}: {keeps}"
        raise error("INVALID_CONFIGURATION", why, key="cluster_id")
    return said, True


class Peers(Ownership):
    """The claims of this process, and of the processes at `addresses`, which may include this process."""

    def __init__(self, claim: Claim, addresses: Sidecars | None) -> None:
        self.claim = claim
        self._neighbours = Neighbours(addresses)
        self.process_id = secrets.token_hex(8)
        self.own_address = ""
        """The address at which the other processes reach this process."""
        self._addresses = [str(address) for address in addresses.addresses] if addresses else []
        self._known: dict[str, Claim] = {}
        """The last known claims of the other processes, by address."""
        self._one_at_a_time = asyncio.Lock()

    # -- the owner of a topic ----------------------------------------------------------------------------------

    def check(self, topic: str) -> None:
        """Raise NOT_OWNER, with the owner's address if it is known. Raise SHARD_CLAIMED_TWICE if there are two
        owners."""
        shard = shard_of(topic)
        if shard in self.claim.shards:
            return
        owners = [address for address, claim in self._known.items() if shard in claim.shards]
        if len(owners) > 1:
            raise error("SHARD_CLAIMED_TWICE", f"{' and '.join(owners)} both claim shard {shard} of topic {topic}")
        owner = owners[0] if owners else ""
        where = f"at {owner}" if owner else "whose address is not known yet"
        raise error("NOT_OWNER", f"topic {topic} is in shard {shard} of another process, {where}", owner_address=owner)

    def check_found(self, topics: Iterable[str]) -> None:
        for topic in topics:
            if (shard := shard_of(topic)) not in self.claim.shards:
                raise error(
                    "SHARD_CLAIMED_TWICE",
                    f"the data directory has topic {topic} of shard {shard}, but its shards are "
                    f"{to_text(self.claim.shards)}",
                    shard=shard,
                )

    def missing(self, topic: str) -> SeqdedupeError:
        # Include the shard in the error: the answer of the shard's process is final, so the client need not ask another
        # process.
        return error("TOPIC_NOT_FOUND", f"there is no topic {topic}", topic=topic, shard=shard_of(topic))

    # -- the other processes -----------------------------------------------------------------------------------

    async def look(self) -> None:
        """Ask the other processes for their claims. If a process does not answer, its last known claim remains valid.

        Raises SHARD_CLAIMED_TWICE if another process claims a shard that is claimed here, and INVALID_CONFIGURATION if
        another process belongs to another cluster.
        """
        answers = await self._ask()
        for address, answer in answers.items():
            if not isinstance(answer, SeqdedupeError):
                self._known[address] = _claim_in(answer)
        for address, claim in self._known.items():
            check_once({THIS: self.claim, address: claim})

    async def keep_looking(self, fatal: Callable[[str], None]) -> None:
        """Call `look` repeatedly. Its errors are fatal, because this process cannot decide which process is right."""
        while True:
            await asyncio.sleep(FIRST_LOOK_SECONDS if unclaimed({THIS: self.claim, **self._known}) else LOOK_SECONDS)
            try:
                await self.look()
            except SeqdedupeError as e:
                fatal(f"{e} {e.hint}")

    async def _ask(self) -> dict[str, admin_pb2.GetShardsResponse | SeqdedupeError]:
        """Return the answers of the other processes by address. Each process is asked once, and this process is not
        included."""
        # A concurrent call may find this process's own address meanwhile.
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
        """Return the answers of the other processes by address. Together these processes have all shards that this
        process does not have.

        Raises SHARDS_INCOMPLETE if a process does not answer or does not exist, SHARD_CLAIMED_TWICE,
        INVALID_CONFIGURATION.
        """
        answers = await self._ask()
        there = {address: one for address, one in answers.items() if not isinstance(one, SeqdedupeError)}
        claims = {THIS: self.claim} | {address: _claim_in(answer) for address, answer in there.items()}
        check_once(claims)
        if lacking := unclaimed(claims):
            silent = [f"{address}: {one}" for address, one in answers.items() if isinstance(one, SeqdedupeError)]
            who = f"no peer that answers has the shards {to_text(lacking)}"
            raise error("SHARDS_INCOMPLETE", "; ".join([who, *silent]), shards=to_text(lacking))
        return there

    # -- the combined answers of all processes -------------------------------------------------------------------

    async def list_topics(
        self, after: str, here: admin_pb2.ListTopicsResponse, page_items: int
    ) -> admin_pb2.ListTopicsResponse:
        """Return a page of the topics of all processes. `here` is the page of this process. Raises the errors of
        `all_others`, UNREACHABLE."""
        others = await self.all_others()
        pages = [here, *await asyncio.gather(*(self._neighbours.topics(address, after) for address in others))]
        topics = sorted((topic for page in pages for topic in page.topics), key=attrgetter("name"))
        is_last = len(topics) <= page_items and not any(page.next for page in pages)
        topics = topics[:page_items]
        return admin_pb2.ListTopicsResponse(topics=topics, next="" if is_last else topics[-1].name)

    async def list_sidecars(self, topics: int) -> list[admin_pb2.ClusterSidecar]:
        """Return all processes by address. `topics` is the number of topics of this process. Raises the errors of
        `all_others`."""
        found = [_sidecar(address, one.shards, one.topics) for address, one in (await self.all_others()).items()]
        found.append(_sidecar(self.own_address, to_text(self.claim.shards), topics))
        found[-1].is_this = True
        return sorted(found, key=attrgetter("name"))

    async def are_serving(self) -> bool:
        """Return whether all others serve."""
        try:
            return all(one.is_serving for one in (await self.all_others()).values())
        except SeqdedupeError:
            return False

    async def everywhere(self, name: str, request: Any, here: Callable[[Any], Awaitable[R]]) -> R:
        """Make a call about a namespace at all other processes, and then in this process. Only the namespace's owner
        may do this.

        Raises NOT_OWNER with the owner's address, so that two changes never run at the same time. Raises the errors of
        `all_others`; after these errors nothing has changed. Raises the error of another process; then some processes
        have made the change, and repeating the call completes the change.
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
