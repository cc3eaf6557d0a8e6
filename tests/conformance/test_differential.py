"""What a real Pulsar broker answered, asked again of DedupeService and of PublishService."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from seqdedupe.client import InvalidRequestError, Range, Verdict
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, admin_pb2_grpc, publish_pb2
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Client, batch, frame_bytes, refused, verdicts
from tests.conformance.broker import ListBroker, Stored
from tests.conformance.cases import DIFFERENTIAL, Difference, differences

OWN_LOG = "A broker's own log"
OWN_LOG_PULSAR = "A broker's own log, with the policy overlap = PULSAR"
SIDECARS_LOG = "The sidecar's log"

WORDS = {Verdict.NOT_DUP: "stored", Verdict.DUP: "dup", Verdict.UNKNOWN: "unknown"}


def observed(step: dict[str, Any]) -> str:
    """What Pulsar's broker answered to a step, in words; empty if the step has no answer."""
    answer = step.get("observed", {})
    if step["op"] == "open":
        return f"last ID {answer['last_sequence_id']}"
    if step["op"] == "pipeline":
        return ", ".join(one["verdict"] for one in answer["answers_in_order"])
    return str(answer.get("verdict", ""))


def in_words(log: list[tuple[str, list[int]]]) -> str:
    return " ".join(f"{name}:{'+'.join(map(str, ids))}" for name, ids in log)


def ids_of(publish: dict[str, Any]) -> list[int]:
    ids: list[int] = publish.get("message_ids", [publish["sequence_id"]])
    return ids


def compare(name: str, answers: list[str], log: str) -> Iterator[Difference]:
    """The differences between Pulsar's answers and these."""
    case = DIFFERENTIAL[name]
    for number, (step, here) in enumerate(zip(case["steps"], answers, strict=True), 1):
        if observed(step) != here:
            yield Difference(name, number, observed(step), here)
    pulsars = in_words([(entry["producer"], entry["ids"]) for entry in case["log"]])
    if pulsars != log:
        yield Difference(name, 0, pulsars, log)


def listed(heading: str, name: str) -> set[Difference]:
    return {row for row in differences(heading) if row.case == name}


def hold_against_the_page(heading: str, name: str, found: list[Difference]) -> None:
    missing = set(found) - listed(heading, name)
    gone = listed(heading, name) - set(found)
    assert not missing, "not on the page:\n" + "\n".join(map(str, sorted(missing, key=lambda d: d.step)))
    assert not gone, "on the page, and not so:\n" + "\n".join(map(str, sorted(gone, key=lambda d: d.step)))


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


@pytest.mark.parametrize("heading", [OWN_LOG, OWN_LOG_PULSAR])
@pytest.mark.parametrize("name", DIFFERENTIAL)
async def test_a_brokers_own_log(name: str, heading: str, for_brokers: Sidecar, topic: str) -> None:
    broker = ListBroker(for_brokers.address, topic)
    await broker.attach()
    if heading == OWN_LOG_PULSAR:
        policy = admin_pb2.TopicPolicy(deduplication_enabled=True, overlap=admin_pb2.OVERLAP_POLICY_PULSAR)
        with grpc.insecure_channel(for_brokers.address) as channel:
            admin_pb2_grpc.AdminServiceStub(channel).SetTopicPolicy(
                admin_pb2.SetTopicPolicyRequest(topic=topic, policy=policy), timeout=TIMEOUT_SECONDS
            )
    driver = OfBroker(for_brokers, broker)
    answers = [await driver.do(step) for step in DIFFERENTIAL[name]["steps"]]
    await broker.close()
    hold_against_the_page(heading, name, list(compare(name, answers, driver.log())))


# -- the sidecar's log ----------------------------------------------------------------------------------------------

CANNOT_BE_SAID = "cannot be said"


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


def is_said(publish: dict[str, Any]) -> bool:
    """Whether it is a message or a batch: there are no ranges that nobody looks into, and no chunks."""
    highest = max(publish.get("highest_sequence_id", 0), publish["sequence_id"])
    return "chunk" not in publish and (highest == publish["sequence_id"] or "message_ids" in publish)


def in_runs(ids: list[int], judged: list[int]) -> str:
    """One word if all rows have the same verdict, else each verdict with its IDs."""
    by_word: dict[str, list[int]] = {}
    for sequence_id, verdict in zip(ids, judged, strict=True):
        by_word.setdefault(WORDS[Verdict(verdict)], []).append(sequence_id)
    if len(by_word) == 1:
        return next(iter(by_word))
    return "; ".join(f"{word} {'+'.join(map(str, some))}" for word, some in by_word.items())


@pytest.mark.parametrize("name", DIFFERENTIAL)
def test_the_sidecars_log(name: str, for_producers: Sidecar, topic: str) -> None:
    driver = OfProducers(for_producers, topic)
    answers = [driver.do(step) for step in DIFFERENTIAL[name]["steps"]]
    found = list(compare(name, answers, driver.log()))
    driver.client.close()
    hold_against_the_page(SIDECARS_LOG, name, found)


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
    for heading in (OWN_LOG, OWN_LOG_PULSAR, SIDECARS_LOG):
        assert {row.case for row in differences(heading)} <= DIFFERENTIAL.keys()
