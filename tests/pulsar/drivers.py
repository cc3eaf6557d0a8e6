"""The same steps for Pulsar's own deduplication and for a topic over the Pulsar log, answered in the same words."""

import asyncio
import urllib.request
from collections.abc import Callable
from typing import Any

from seqdedupe.core.rule import NOT_DUP
from seqdedupe.errors import SeqdedupeError
from seqdedupe.topic.frame import FrameReceipt, NumbersCache, Refusal
from seqdedupe.topic.operations import open_sessions
from tests.batches import batch
from tests.conformance.cases import CANNOT_BE_SAID, ids_of, in_runs, in_words, is_said
from tests.log.conformance import replayed
from tests.pulsar.owners import LIMIT_SECONDS, Cluster
from tests.pulsar.publishers import PAUSE_SECONDS, Process
from tests.pulsar.wire import Chunk, Connection, Publish, ids_in_batch, open_producer


class OfPulsar:
    """Stock producers on a topic of a real broker, whose deduplication is on."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self.cluster, self.topic = cluster, topic
        self._sessions: dict[str, Connection] = {}

    async def do(self, step: dict[str, Any]) -> str:
        match step["op"]:
            case "open":
                if before := self._sessions.get(step["session"]):
                    await before.close()
                await self.cluster.until_deduplicating(self.topic)
                opened = await open_producer(self.cluster.service_url, self.topic, step["producer"])
                self._sessions[step["session"]] = opened
                return f"last ID {opened.last_sequence_id}"
            case "publish" | "pipeline":
                session, several = self._sessions[step["session"]], step.get("publishes", [step])
                session.send([_publish(one) for one in several])
                return ", ".join([await session.answer() for _ in several])
            case "drop_connection":
                await self._sessions[step["session"]].close()
            case "unload_topic":
                await self.cluster.admin.unload(self.topic)
            case op:
                raise AssertionError(f"nobody knows {op}")
        return ""

    async def log(self) -> str:
        return in_words(await self.entries())

    async def entries(self) -> list[tuple[str, list[int]]]:
        """Producer and sequence IDs of each entry, in order."""
        path = self.topic.replace("://", "/")
        stats = await self.cluster.url.get(f"{path}/internalStats")
        last_ledger, _, last_entry = stats["lastConfirmedEntry"].partition(":")
        entries = {ledger["ledgerId"]: ledger["entries"] for ledger in stats["ledgers"]}
        entries[int(last_ledger)] = int(last_entry) + 1
        places = [f"{path}/ledger/{ledger}/entry/{entry}" for ledger in entries for entry in range(entries[ledger])]
        return [await asyncio.to_thread(self._entry, place) for place in places]

    def _entry(self, path: str) -> tuple[str, list[int]]:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with direct.open(f"{self.cluster.admin_url}/admin/v2/{path}", timeout=LIMIT_SECONDS) as answer:
            heads = answer.headers
            if heads.get("X-Pulsar-num-batch-message"):
                return heads["X-Pulsar-producer-name"], list(ids_in_batch(answer.read()))
            return heads["X-Pulsar-producer-name"], [int(heads["X-Pulsar-sequence-id"])]

    async def close(self) -> None:
        for session in self._sessions.values():
            await session.close()


def _publish(step: dict[str, Any]) -> Publish:
    chunk = Chunk(*step["chunk"]) if "chunk" in step else None
    return Publish(step["sequence_id"], step.get("highest_sequence_id"), step.get("message_ids", ()), chunk)


class OfTopic:
    """Sessions of a topic over the Pulsar log."""

    def __init__(self, cluster: Cluster, topic: str, make: Callable[[], Process]) -> None:
        self.cluster, self.topic = cluster, topic
        self._make = make
        self._sessions: dict[str, tuple[str, int, list[int]]] = {}
        """Producer, epoch, and what counts for the link: what Open answered, and what was sent since."""

    async def start(self) -> None:
        """Again too: then nothing is known but the log."""
        self.process = self._make()
        await self.process.start()

    async def do(self, step: dict[str, Any]) -> str:
        match step["op"]:
            case "open":
                epoch, persisted = await self._open(step["producer"])
                self._sessions[step["session"]] = (step["producer"], epoch, [persisted])
                return f"last ID {persisted}"
            case "publish" | "pipeline":
                return await self._publish(step["session"], step.get("publishes", [step]))
            case "unload_topic":
                await self.cluster.admin.unload(self.topic)
            case "drop_connection":
                # Sessions are no connections.
                pass
            case op:
                raise AssertionError(f"nobody knows {op}")
        return ""

    async def _open(self, producer: str) -> tuple[int, int]:
        async with asyncio.timeout(LIMIT_SECONDS):
            while True:
                try:
                    opened = await open_sessions(self.process.topic, [producer], None)
                except SeqdedupeError:
                    await asyncio.sleep(PAUSE_SECONDS)
                else:
                    return opened.epochs[0], opened.persisted[0]

    async def _publish(self, session: str, publishes: list[dict[str, Any]]) -> str:
        """The answers in the order in which they come."""
        if any(not is_said(one) for one in publishes):
            return CANNOT_BE_SAID
        name, epoch, sent = self._sessions[session]
        answers: list[str] = []
        heard = asyncio.Event()

        def hear(ids: list[int], answer: FrameReceipt | Refusal) -> None:
            assert isinstance(answer, FrameReceipt), answer
            judged = [NOT_DUP] * len(ids) if answer.verdicts is None else answer.verdicts.tolist()
            answers.append(in_runs(ids, judged))
            heard.set()

        for one in publishes:
            ids = ids_of(one)
            link = max((i for i in sent if i < ids[0]), default=-1)
            encoded = batch([(name, i) for i in ids], epochs={name: epoch}, links={name: link}).encode()
            sent += ids
            self.process.topic.admit(encoded, 1, lambda answer, ids=ids: hear(ids, answer), NumbersCache())  # type: ignore[misc]
        async with asyncio.timeout(LIMIT_SECONDS):
            while len(answers) < len(publishes):
                heard.clear()
                await heard.wait()
        return ", ".join(answers)

    async def log(self) -> str:
        return in_words(await self.entries())

    async def entries(self) -> list[tuple[str, list[int]]]:
        """Producer and sequence IDs of each batch, in order."""
        return [
            (record.batch.producer_names.decode(), list(record.batch.sequence_ids))
            for record in await replayed(self.process.topic.log)
            if record.HasField("batch")
        ]

    async def close(self) -> None:
        await self.process.close()
