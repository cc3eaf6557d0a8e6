"""What a real Pulsar broker answered, asked again of DedupeService and of PublishService."""

from typing import Any

import grpc
import pytest

from seqdedupe.client import InvalidRequestError, Range, Verdict
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, admin_pb2_grpc, publish_pb2
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Client, batch, frame_bytes, refused, verdicts
from tests.conformance.broker import ListBroker, Stored
from tests.conformance.cases import (
    CANNOT_BE_SAID,
    DIFFERENTIAL,
    OWN_LOG,
    SIDECARS_LOG,
    WORDS,
    compare,
    differences,
    hold_against_the_page,
    ids_of,
    in_runs,
    in_words,
    is_said,
    listed,
)

# -- a broker's own log ---------------------------------------------------------------------------------------------


class OfBroker:
    """Drives a scenario through a broker whose log is a list."""

    def __init__(self, sidecar: Sidecar, broker: ListBroker) -> None:
        self.sidecar, self.broker = sidecar, broker
        self.producers: dict[str, str] = {}

    async def do(self, step: dict[str, Any]) -> str:
        match step["op"]:
            case "open":
                self.producers[step["session"]] = step["producer"]
                return f"last ID {(await self.broker.numbers(step['producer'])).pushed}"
            case "publish":
                return await self._publish(step, step["session"])
            case "pipeline":
                return await self._pipeline(step)
            case "drop_connection":
                self.broker.attached.release(self.producers[step["session"]])
            case "restart_broker":
                self.sidecar.restart()
                await self.broker.attach()
            case "unload_topic":
                await self.broker.attach()
            case op:
                raise AssertionError(f"nobody knows {op}")
        return ""

    def _stored(self, publish: dict[str, Any], session: str) -> Stored:
        lowest = publish["sequence_id"]
        _, place, chunks = publish.get("chunk", ["", 0, 1])
        highest = max(publish.get("highest_sequence_id", 0), lowest)
        return Stored(Range(self.producers[session], lowest, highest, place + 1 < chunks), tuple(ids_of(publish)))

    async def _publish(self, publish: dict[str, Any], session: str) -> str:
        try:
            return WORDS[await self.broker.publish(self._stored(publish, session))]
        except InvalidRequestError as e:
            return e.reason

    async def _pipeline(self, step: dict[str, Any]) -> str:
        """What is not new is answered at once, what is new when it is stored."""
        answers = [await self.broker.check(self._stored(one, step["session"])) for one in step["publishes"]]
        while self.broker.in_flight:
            self.broker.settle()
        return ", ".join(WORDS[verdict] for verdict in sorted(answers, key=lambda v: v is Verdict.NOT_DUP))

    def log(self) -> str:
        return in_words([(entry.range.producer_name, list(entry.ids)) for entry in self.broker.log])


@pytest.mark.parametrize("overlap", ["default", "PULSAR"])
@pytest.mark.parametrize("name", DIFFERENTIAL)
async def test_a_brokers_own_log(name: str, overlap: str, for_brokers: Sidecar, topic: str) -> None:
    broker = ListBroker(for_brokers.address, topic)
    await broker.attach()
    rows = listed(OWN_LOG, name)
    if overlap == "PULSAR":
        rows = {row for row in rows if row.here != "OVERLAP"}
        policy = admin_pb2.TopicPolicy(deduplication_enabled=True, overlap=admin_pb2.OVERLAP_POLICY_PULSAR)
        with grpc.insecure_channel(for_brokers.address) as channel:
            admin_pb2_grpc.AdminServiceStub(channel).SetTopicPolicy(
                admin_pb2.SetTopicPolicyRequest(topic=topic, policy=policy), timeout=TIMEOUT_SECONDS
            )
    driver = OfBroker(for_brokers, broker)
    answers = [await driver.do(step) for step in DIFFERENTIAL[name]["steps"]]
    await broker.close()
    hold_against_the_page(rows, list(compare(name, answers, driver.log())))


# -- the sidecar's log ----------------------------------------------------------------------------------------------


class OfProducers:
    """Drives a scenario through sessions of PublishService."""

    def __init__(self, sidecar: Sidecar, topic: str) -> None:
        self.sidecar, self.topic = sidecar, topic
        self.client = Client(sidecar.address)
        self.sessions: dict[str, tuple[str, int, list[int]]] = {}
        """Producer, epoch, and what counts for the link: what Open answered, and what was sent since."""

    def do(self, step: dict[str, Any]) -> str:
        match step["op"]:
            case "open":
                opened = self.client.open(self.topic, step["producer"])
                self.sessions[step["session"]] = (step["producer"], opened.epochs[0], list(opened.persisted))
                return f"last ID {opened.persisted[0]}"
            case "publish" | "pipeline":
                return self._publish(step["session"], step.get("publishes", [step]))
            case "restart_broker":
                self.sidecar.restart()
            case "drop_connection" | "unload_topic":
                # Sessions are no connections, and a topic is not unloaded.
                pass
            case op:
                raise AssertionError(f"nobody knows {op}")
        return ""

    def _publish(self, session: str, publishes: list[dict[str, Any]]) -> str:
        """All in one message of a stream; the answers in the order in which they come."""
        if any(not is_said(one) for one in publishes):
            return CANNOT_BE_SAID
        name, epoch, sent = self.sessions[session]
        stream = self.client.stream(self.topic)
        message, rows = b"", {}
        for frame, one in enumerate(publishes, 1):
            ids = rows[frame] = ids_of(one)
            link = max((i for i in sent if i < ids[0]), default=-1)
            message += frame_bytes(frame, batch([(name, i) for i in ids], {name: epoch}, {name: link}))
            sent += ids
        stream.send_raw(message)
        answers = {frame: stream.answer(frame) for frame in rows}
        stream.end()
        words = {}
        for frame, answer in answers.items():
            assert isinstance(answer, publish_pb2.Receipt), answer
            words[frame] = in_runs(rows[frame], verdicts(answer, len(rows[frame])))
        return ", ".join(words[frame] for frame in stream.arrived)

    def log(self) -> str:
        return in_words(
            [
                (record.batch.producer_names.decode(), list(record.batch.sequence_ids))
                for record in self.client.records(self.topic)
            ]
        )


@pytest.mark.parametrize("name", DIFFERENTIAL)
def test_the_sidecars_log(name: str, for_producers: Sidecar, topic: str) -> None:
    driver = OfProducers(for_producers, topic)
    answers = [driver.do(step) for step in DIFFERENTIAL[name]["steps"]]
    found = list(compare(name, answers, driver.log()))
    driver.client.close()
    hold_against_the_page(listed(SIDECARS_LOG, name), found)


# -- what no scenario has -------------------------------------------------------------------------------------------


def test_ids_below_0_and_falling_ones_are_refused(for_producers: Sidecar, topic: str) -> None:
    client = Client(for_producers.address)
    epochs = client.epochs(topic, "A")
    for ids, reason in (([-1], "INVALID_SEQUENCE_ID"), ([5, 4], "NOT_ASCENDING"), ([5, 5], "NOT_ASCENDING")):
        content = batch([("A", i) for i in ids], epochs, {"A": -1})
        assert refused(lambda c=content: client.publish_unary(topic, c)).reason == reason  # type: ignore[misc]
    assert client.producer(topic, "A")[:2] == (-1, -1)
    client.close()


def test_a_second_session_fences_the_first(for_producers: Sidecar, topic: str) -> None:
    client = Client(for_producers.address)
    first, second = client.epochs(topic, "A"), client.epochs(topic, "A")
    content = batch([("A", 0)], first, {"A": -1})
    assert refused(lambda: client.publish_unary(topic, content)).reason == "FENCED"
    assert verdicts(client.publish_unary(topic, batch([("A", 0)], second, {"A": -1})), 1) == [Verdict.NOT_DUP]
    client.close()


async def test_a_falling_range_and_an_id_below_0_are_refused(for_brokers: Sidecar, topic: str) -> None:
    broker = ListBroker(for_brokers.address, topic)
    await broker.attach()
    for lowest, highest in ((5, 4), (-1, -1), (-1, 3)):
        with pytest.raises(InvalidRequestError, match="INVALID_SEQUENCE_ID"):
            await broker.publish(Stored(Range("A", lowest, highest)))
    assert await broker.numbers("A") == (-1, -1)
    await broker.close()


def test_the_page_lists_nothing_of_cases_that_are_none() -> None:
    for heading in (OWN_LOG, SIDECARS_LOG):
        assert {row.case for row in differences(heading)} <= DIFFERENTIAL.keys()
