"""Inputs, functions and deployments that are awkward, and none of which may cost a message or bring all to a halt."""

import base64
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from seqdedupe import functions
from seqdedupe.entry_properties import ENTRY, EVENT_TIME_MS, KEY_BASE64, KIND, USER, EntryPlace
from seqdedupe.errors import ConfigurationError
from seqdedupe.functions import DedupeFunction
from seqdedupe.functions.deployment import check_deployment
from seqdedupe.functions.instance import Owners
from seqdedupe.limits import MIN_EVENT_TIME_MS
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.functions import examples
from tests.functions.awkward import CallsBackForever, Untold
from tests.functions.runtime import (
    TOPIC,
    Context,
    Ended,
    Id,
    Message,
    Runtime,
    TestProcess,
    details,
    inputs,
    source,
    written,
)
from tests.functions.test_instance import Start, payloads, start, stored

__all__ = ["start"]

OURS = "tests.functions.awkward"


class Unreadable(Context):
    """Its message has a property that is no text: Pulsar takes that, and its client raises."""

    def get_message_properties(self) -> dict[str, str]:
        return {"a": b"\xff".decode()}


def give_unreadable(runtime: Runtime, message: Message) -> None:
    context = Unreadable(runtime)
    context.message = message
    assert runtime.instance is not None
    runtime.instance.take(context)


# -- functions -----------------------------------------------------------------------------------------------------


def test_an_error_that_cannot_say_what_it_is_is_set_aside_as_others(
    start: Start, shared_sidecar: Sidecar, topic: str, caplog: pytest.LogCaptureFixture
) -> None:
    runtime = start(f"{OURS}.RaisesUntold", dead_letter_topic=f"dead-{topic}", max_message_retries=0.0)
    runtime.give(inputs(3))
    runtime.until_acknowledged(3)
    (letter,) = stored(shared_sidecar, f"dead-{topic}")
    assert letter.properties["dedupe.error"].startswith("Untold: ")
    assert payloads(shared_sidecar, topic) == [b"0", b"2"]
    [said] = [record for record in caplog.records if "the function has failed on" in record.getMessage()]
    assert "Untold" in said.getMessage()
    # A formatter may ask the error for its text, as PySpark's does.
    assert said.exc_info is None


def test_whatever_an_error_says_of_itself_nothing_is_raised_into_the_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    process = TestProcess()
    monkeypatch.setattr(process, "end", lambda why, *, failed: setattr(process, "why", why))
    monkeypatch.setattr(functions, "InstanceProcess", lambda: process)

    def fails(context: object, process: object) -> None:
        raise Untold(7)

    monkeypatch.setattr(functions, "_instance", fails)
    DedupeFunction().process(b"", None)
    assert process.why.startswith("Untold: ")


def test_the_output_topic_is_told_to_the_function(start: Start, shared_sidecar: Sidecar, topic: str) -> None:
    runtime = start(f"{OURS}.ToItsOutputTopic")
    runtime.give(inputs(3))
    runtime.until_acknowledged(3)
    assert payloads(shared_sidecar, topic) == [b"0", b"1", b"2"]


def test_a_serde_that_makes_no_bytes_is_the_functions_failure(
    start: Start, shared_sidecar: Sidecar, topic: str
) -> None:
    dead = f"dead-{topic}"
    runtime = start(output_serde=f"{OURS}.NumberSerDe", dead_letter_topic=dead, max_message_retries=0.0)
    runtime.give(inputs(1))
    runtime.until_acknowledged(1)
    (letter,) = stored(shared_sidecar, dead)
    assert "a SerDe has made int" in letter.properties["dedupe.error"]


@pytest.mark.parametrize(
    ("wrapped", "config", "said"),
    [
        ("Copy", {"output_topic": ""}, "output_topic is not set"),
        (f"{OURS}.NoSuchSerDe", {}, "Missing cannot be imported"),
    ],
)
def test_what_is_wrong_for_every_message_sets_none_aside(
    start: Start, topic: str, wrapped: str, config: dict[str, Any], said: str
) -> None:
    deployed = details(name=topic, sink=SimpleNamespace(topic="", serDeClassName="", schemaType=""))
    runtime = start(wrapped, deployed=deployed, dead_letter_topic=f"dead-{topic}", **config)
    with pytest.raises(ConfigurationError, match=said):
        runtime.give(inputs(1))
    assert runtime.acks == []


def test_a_callback_that_never_returns_does_not_hold_the_instance_for_ever(start: Start) -> None:
    runtime = start(f"{OURS}.CallsBackForever", max_in_flight_messages=1.0, give_up_after_seconds=1.0)
    CallsBackForever.go_on.clear()
    try:
        with pytest.raises(Ended, match="has waited for 1 seconds"):
            runtime.give(inputs(2))
    finally:
        CallsBackForever.go_on.set()


def test_what_was_set_aside_stays_so_when_inputs_of_another_ledger_have_come(
    start: Start, shared_sidecar: Sidecar, topic: str
) -> None:
    runtime = start("Fails", bad="3", max_message_retries=0.0, dead_letter_topic=f"dead-{topic}")
    runtime.give(inputs(5))
    runtime.give([Message(b"9", Id(0, ledger_id=8))])
    calls = examples.Fails.calls
    runtime.give([Message(b"3", Id(3))])
    runtime.give([Message(b"10", Id(1, ledger_id=8))])
    runtime.until_acknowledged(8)
    assert examples.Fails.calls - calls == 1
    assert payloads(shared_sidecar, f"dead-{topic}") == [b"3"]


# -- the end -------------------------------------------------------------------------------------------------------


def test_told_to_stop_it_does_not_call_it_a_failure_that_nothing_can_be_acknowledged(start: Start) -> None:
    """Pulsar's runtime closes its consumers before it ends."""
    runtime = start()
    runtime.process.is_stopping = True

    def closed(message_id: Id, topic: str) -> None:
        raise RuntimeError("AlreadyClosed")

    runtime.acknowledged = closed  # type: ignore[method-assign]
    runtime.give(inputs(1))
    assert runtime.process.ended.wait(LAST_RESORT_SECONDS)
    assert not runtime.process.failed
    assert "asked to stop" in runtime.process.why


def test_metrics_are_recorded_while_it_waits_too(start: Start) -> None:
    runtime = start(address="127.0.0.1:1")
    recorded = threading.Event()

    def record(name: str, value: float) -> None:
        if name == "dedupe_resumes" and value > 0:
            recorded.set()

    runtime.on_metric = record
    runtime.give(inputs(1))
    assert recorded.wait(LAST_RESORT_SECONDS)


# -- inputs --------------------------------------------------------------------------------------------------------


def test_an_event_time_that_cannot_be_kept_is_a_dead_letter_without(
    start: Start, shared_sidecar: Sidecar, topic: str
) -> None:
    runtime = start(dead_letter_topic=f"dead-{topic}", max_message_retries=0.0)
    runtime.give([Message(b"0", Id(0), key="k", event_time_ms=2**63), *inputs(1, first=1)])
    runtime.until_acknowledged(2)
    (letter,) = stored(shared_sidecar, f"dead-{topic}")
    assert (letter.payload, letter.key, letter.event_time_ms) == (b"0", b"k", 0)
    assert "event time" in letter.properties["dedupe.error"]
    assert payloads(shared_sidecar, topic) == [b"1"]


def test_properties_that_are_no_text_make_a_dead_letter_without_them(
    start: Start, shared_sidecar: Sidecar, topic: str
) -> None:
    runtime = start(dead_letter_topic=f"dead-{topic}", max_message_retries=0.0)
    runtime.give(inputs(1))
    give_unreadable(runtime, Message(b"1", Id(1)))
    runtime.give(inputs(1, first=2))
    runtime.until_acknowledged(3)
    (letter,) = stored(shared_sidecar, f"dead-{topic}")
    assert letter.payload == b"1"
    assert "UnicodeDecodeError" in letter.properties["dedupe.error"]
    assert payloads(shared_sidecar, topic) == [b"0", b"2"]


def test_a_message_of_somebody_else_is_no_marker_whatever_it_calls_itself(
    start: Start, shared_sidecar: Sidecar, topic: str
) -> None:
    runtime = start()
    runtime.give([Message(b"0", Id(0), properties={KIND: "marker"})])
    runtime.until_acknowledged(1)
    assert payloads(shared_sidecar, topic) == [b"0"]


@pytest.mark.parametrize("time_ms", [-5, MIN_EVENT_TIME_MS])
def test_what_pulsar_could_not_have_as_it_was_comes_out_as_it_was(
    start: Start, shared_sidecar: Sidecar, topic: str, time_ms: int
) -> None:
    key = base64.b64encode(b"\xff\x00").decode()
    own = {KEY_BASE64: key, EVENT_TIME_MS: str(time_ms), f"{USER}seqdedupe.own": "mine", "a": "b"}
    runtime = start()
    runtime.give([Message(b"0", Id(0), key=key, properties=written(0) | own)])
    runtime.until_acknowledged(1)
    (message,) = stored(shared_sidecar, topic)
    assert (message.key, message.event_time_ms) == (b"\xff\x00", time_ms)
    assert message.properties == {"seqdedupe.own": "mine", "a": "b"}


@pytest.mark.parametrize("identity", ["index", "message_id"])
def test_what_an_owner_wrote_when_another_one_had_taken_over_counts_for_nobody(
    start: Start, shared_sidecar: Sidecar, topic: str, identity: str
) -> None:
    """Its producer sent it again, to the new owner: by then it could have another index, and that index another one."""
    given = [
        Message(b"a", Id(0), properties=written(0)),
        Message(b"", Id(1), properties=written(-1, "marker", term=4)),
        Message(b"lost", Id(2), properties=written(1)),
        Message(b"b", Id(3), properties=written(1, term=4)),
        Message(b"lost", Id(4), properties=written(2)),
        Message(b"c", Id(5), properties=written(2, term=4)),
    ]
    runtime = start(identity=identity)
    runtime.give(given)
    runtime.give(given)  # all come again
    runtime.until_acknowledged(12)
    assert payloads(shared_sidecar, topic) == [b"a", b"b", b"c"]


@pytest.mark.parametrize("identity", ["index", "message_id"])
def test_what_follows_a_refused_entry_counts_for_nobody(
    start: Start, shared_sidecar: Sidecar, topic: str, identity: str
) -> None:
    """It comes again at other indexes. Anyone who had taken it would take those for duplicates, and lose them."""
    given = [
        Message(b"", Id(0), properties=written(-1, "marker")),
        Message(b"a", Id(1), properties=written(1)),
        Message(b"lost", Id(2), properties=written(3)),
        Message(b"of a stranger", Id(3)),
        Message(b"lost", Id(4), properties=written(4)),
        Message(b"", Id(5), properties=written(-1, "marker", term=4)),
        Message(b"b", Id(6), properties={ENTRY: f"1:99:4:{4:016x}:1:2"}),
    ]
    if identity == "index":
        del given[3]
    runtime = start(identity=identity)
    runtime.give(given)
    runtime.give(given)  # all come again
    runtime.until_acknowledged(2 * len(given))
    others = [b"of a stranger"] if identity == "message_id" else []
    assert payloads(shared_sidecar, topic) == [b"a", *others, b"b"]


def verdicts(*places: tuple[dict[str, str] | None, int, int]) -> list[bool]:
    owners = Owners()
    return [
        owners.is_void(None if properties is None else EntryPlace.parse(properties[ENTRY], TOPIC), *at)
        for properties, *at in places
    ]


def test_a_hole_needs_every_position() -> None:
    begins = (written(1), 7, 1), (written(2), 7, 2)
    assert verdicts(*begins, (written(4), 7, 3), (written(3), 7, 4)) == [False, False, True, True]
    assert verdicts(*begins, (None, 7, 3), (written(4), 7, 4)) == [False, False, False, True]
    for at in ((7, 4), (8, 0)):
        # Somebody has skipped an input, perhaps.
        assert not any(verdicts(*begins, (written(4), *at)))
    # What comes again is judged as before, also when there is another owner.
    again = [(written(2), 7, 2), (written(4), 7, 3), (written(0, "marker", term=4), 7, 5), (written(4), 7, 3)]
    assert verdicts(*begins, (written(4), 7, 3), *again) == [False, False, True, False, True, False, True]


def test_a_topic_that_was_made_anew_begins_with_any_term() -> None:
    owners = Owners()
    places = [
        (written(5, term=7), 1),
        (written(0, term=1, incarnation=100), 2),
        (written(1, term=1, incarnation=100), 3),
    ]
    for properties, entry_id in places:
        place = EntryPlace.parse(properties[ENTRY], TOPIC)
        assert place is not None
        assert not owners.is_void(place, 7, entry_id)


# -- deployments ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["persistent://public/default/flüge nach süden", "public/default/in", "in", TOPIC])
def test_an_input_topic_has_any_name_that_pulsar_takes(start: Start, topic: str, name: str) -> None:
    full = name if "://" in name else f"persistent://{name if '/' in name else f'public/default/{name}'}"
    spec = SimpleNamespace(isRegexPattern=False, serdeClassName="", schemaType="")
    runtime = start(deployed=details(name=topic, source=source(inputSpecs={name: spec})))
    runtime.give([Message(b"0", Id(0), f"{full}-partition-3"), Message(b"1", Id(1), full)])
    runtime.until_acknowledged(2)
    assert {given for given, _ in runtime.acks} == {name}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sink": SimpleNamespace(topic="out", serDeClassName="x.Y", schemaType="")}, "x.Y for its outputs"),
        ({"sink": SimpleNamespace(topic="out", serDeClassName="", schemaType="avro")}, "avro for its outputs"),
        ({"source": source(inputSpecs={"non-persistent://public/default/in": None})}, "not persistent"),
    ],
)
def test_what_would_be_left_out_in_silence_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check_deployment(details(**changes))


def test_names_that_are_too_long_are_said_to_be_the_functions_and_the_topics(start: Start, topic: str) -> None:
    runtime = start(deployed=details(name=topic + "x" * 200))
    with pytest.raises(ConfigurationError, match="bytes long") as failure:
        runtime.give(inputs(1))
    assert "Shorten the function's name or the topic's" in failure.value.hint
