"""The Pulsar cluster that stores the logs, with the configured connections, and moves of the cluster's topics from this
sidecar to a different sidecar.

Begin with `LogCluster`. `Moves` releases a topic of this sidecar, and waits until a different sidecar takes the topic
over.
"""

import asyncio
import ssl
import time
from pathlib import Path

from broker_sidecar.cluster.peers import TAKE_SECONDS, Neighbours, listed
from broker_sidecar.config import Config, PulsarConfig
from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar import topic_owner
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.log.pulsar.broker_wire import Brokers
from seqdedupe.log.pulsar.entries import EntryFormat
from seqdedupe.log.pulsar.log import PulsarResources
from seqdedupe.log.pulsar.logs import PulsarLogs
from seqdedupe.log.pulsar.tokens import OAuth2, Token, from_file
from seqdedupe.log.pulsar.topic_owner import SeenOwner, owner_of
from seqdedupe.pulsar_wire.pulsar_api_pb2 import CompressionType
from seqdedupe.store.db import Store
from seqdedupe.store.directories import StoreInstance
from seqdedupe.tasks import shielded
from seqdedupe.topic.topic import Topic
from seqdedupe.v1 import admin_pb2

LOOK_PAUSE_SECONDS = 0.05
"""The pause between two calls of the admin URL that look at topics repeatedly: 20 per second for any number of
topics."""

STANDBYS = 2
"""The number of sidecars that follow a topic, including its owner. Clients ask these sidecars first."""


class LogCluster:
    """`logs`, and what they need of the cluster. Raises INVALID_CONFIGURATION, STORE_UNAVAILABLE."""

    def __init__(self, config: Config, store: Store) -> None:
        asked, instance = config.pulsar, StoreInstance(store)
        self.tls = tls = _tls(asked)
        token = _token(asked)
        self._sidecars = listed(config)
        self.neighbours = Neighbours(self._sidecars)
        self.shared = PulsarResources(
            instance.named(config.instance_name),
            config.advertised_address or config.listen,
            lambda: time.time_ns() // 1_000_000,
            lambda _, known: instance.claim_opening(known),
            PulsarAdmin(AdminUrl(asked.admin_url, token, tls)),
            self.neighbours.answers,
            Brokers(asked.service_url, token, tls),
            PulsarAdmin(AdminUrl(asked.admin_url, token, tls, pause_seconds=LOOK_PAUSE_SECONDS)),
            asked.manage_topic_policies,
            compression=CompressionType.Value(asked.compression.upper()),
        )
        self.namespaces = asked.namespace_names
        self.moves = Moves()
        self.logs = PulsarLogs(
            self.shared,
            self.namespaces,
            EntryFormat(asked.entry_format),
            may_change_policies=asked.manage_topic_policies,
        )

    def is_near(self, topic: str) -> bool:
        """Return whether this sidecar is the first or the second sidecar that clients ask for the topic. Return true if
        no sidecars are listed."""
        own = SidecarAddress.parse(self.shared.address)
        return self._sidecars is None or own in self._sidecars.in_order(topic)[:STANDBYS]

    async def owner_of(self, topic: str) -> str:
        """Return the address of another owner; see `OwnerOf`."""
        address = await owner_of(topic, self.shared.admin)
        # A lost producer of this sidecar may still be listed.
        return "" if address == self.shared.address else address

    async def sidecars(self) -> list[SeenOwner]:
        """Return the sidecars; see `topic_owner.sidecars`."""
        return await topic_owner.sidecars(self.shared.admin, self.namespaces)

    async def forget(self, name: str) -> list[str]:
        """Forget a lost sidecar; see `topic_owner.forget`."""
        return await topic_owner.forget(self.shared.admin, self.namespaces, name, self.neighbours.instance_name)


def _token(asked: PulsarConfig) -> Token | None:
    if asked.token_file:
        return from_file(Path(asked.token_file))
    if asked.has_oauth2:
        return OAuth2(asked.oauth2_issuer_url, Path(asked.oauth2_credentials_file), asked.oauth2_audience)
    return None


def _tls(asked: PulsarConfig) -> ssl.SSLContext:
    """Return the TLS context for admin calls. It is as strict as the configuration of the client for messages."""
    try:
        context = ssl.create_default_context(cafile=asked.tls_trust_certs_file_path or None)
    except (OSError, ssl.SSLError) as e:
        raise error(
            "INVALID_CONFIGURATION",
            f"pulsar.tls_trust_certs_file_path is {asked.tls_trust_certs_file_path!r}: no certificate can be read "
            f"from it ({e})",
            key="pulsar.tls_trust_certs_file_path",
        ) from e
    context.check_hostname = asked.tls_enable_hostname_verification
    return context


# -- Moving a topic of the cluster from this sidecar to another one.

AWAY_SECONDS = 2 * TAKE_SECONDS
"""The time for which this sidecar does not take over a released topic. Another sidecar must serve the topic within half
of this time. Clients wait for longer than this time."""
POLL_SECONDS = 0.1


class Moves:
    """Moves in progress. They continue after their callers have disconnected."""

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Task[str]] = {}

    async def move(self, topic: Topic, to: str, cluster: LogCluster) -> str:
        """Release a topic, unless the sidecar at `to` already serves the topic. Return the address of the sidecar that
        serves the topic afterwards.

        Raises NOT_OWNER or another error if this sidecar does not serve the topic, INVALID_ADDRESS, MOVE_FAILED.
        """
        topic.check_serving()
        to = str(SidecarAddress.parse(to)) if to else ""
        if to == cluster.shared.address:
            return to
        if topic.name in self._under_way:
            raise error("MOVE_FAILED", f"topic {topic.name} is being moved already")
        return await shielded(self._under_way, topic.name, _move(topic, to, cluster))


async def _move(topic: Topic, to: str, cluster: LogCluster) -> str:
    if to:
        await _check_can_have(topic, to, cluster.neighbours)
    await topic.owner.hand_over(to, AWAY_SECONDS)
    said = [f"no sidecar has taken it within {TAKE_SECONDS:.0f} s"]
    try:
        async with asyncio.timeout(TAKE_SECONDS):
            return await _taken(topic, to, cluster, said)
    except (SeqdedupeError, TimeoutError) as e:
        why = "; ".join(said)
        raise error("MOVE_FAILED", f"topic {topic.name} was not moved, and this sidecar takes it again: {why}") from e
    finally:
        # Allow a takeover again. If no sidecar has the topic, this call takes the topic back. Otherwise the call shows
        # which sidecar has the topic.
        topic.owner.wanted.set()


async def _check_can_have(topic: Topic, address: str, others: Neighbours) -> None:
    """Raise MOVE_FAILED unless the sidecar at this address knows the topic and is a standby for it."""
    try:
        known = await others.topic(address, topic.name)
    except SeqdedupeError as e:
        raise error("MOVE_FAILED", f"topic {topic.name} stays here: {e}", hint=e.hint) from e
    if known.incarnation != topic.incarnation:
        what = f"the sidecar at {address} has another topic of that name, perhaps in another cluster"
        raise error("MOVE_FAILED", f"topic {topic.name} stays here: {what}")
    if known.state != admin_pb2.TOPIC_STATE_STANDBY:
        state = admin_pb2.TopicState.Name(known.state).removeprefix("TOPIC_STATE_")
        raise error("MOVE_FAILED", f"topic {topic.name} stays here: at {address} it is {state}: {known.why}")


async def _taken(topic: Topic, to: str, cluster: LogCluster, said: list[str]) -> str:
    """Return the address of the sidecar that serves the topic, once a sidecar does: the sidecar at `to`, or with an
    empty `to` any owner.

    Raises the reason why the sidecar at `to` does not serve the topic. The last element of `said` is the last error.
    """
    while True:
        try:
            address = to or await _next_owner(topic.name, cluster)
            await cluster.neighbours.take(address, topic.name)
            return address
        except SeqdedupeError as e:
            said[1:] = [str(e)]
            # The sidecar may have tried just before the release. If `to` is empty, a different sidecar may become the
            # owner.
            if to and e.reason != "NOT_OWNER":
                raise
        await asyncio.sleep(POLL_SECONDS)


async def _next_owner(name: str, cluster: LogCluster) -> str:
    """Return the address of the next owner of the topic, once another sidecar owns it."""
    while not (address := await cluster.owner_of(name)):  # noqa: ASYNC110 (nobody tells)
        await asyncio.sleep(POLL_SECONDS)
    return address
