"""What a function learns, and how it has to be deployed."""

from types import SimpleNamespace
from typing import Any

import pytest

from seqdedupe.entry_properties import EntryPlace
from seqdedupe.errors import ConfigurationError, SeqdedupeError
from seqdedupe.functions import identity
from seqdedupe.functions.deployment import FunctionSettings, check_deployment, settings_of
from tests.functions.runtime import TOPIC, details, source


def test_numbers_come_as_floats() -> None:
    given = {"wrapped": "m.C", "max_in_flight_messages": 10.0, "max_message_retries": 0.0, "own": [1]}
    assert settings_of(given) == FunctionSettings(wrapped="m.C", max_in_flight_messages=10, max_message_retries=0)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "wrapped is required"),
        ({"wrapped": ""}, "wrapped is required"),
        ({"wrapped": 3.0}, "wrapped is 3.0"),
        ({"wrapped": "m", "identity": "key"}, "identity is 'key'"),
        ({"wrapped": "m", "max_in_flight_messages": 0.0}, "at least 1"),
        ({"wrapped": "m", "max_in_flight_messages": 1.5}, "a whole number"),
        ({"wrapped": "m", "retry_delay_ms": True}, "a whole number"),
        ({"wrapped": "m", "sidecar_address": "nowhere"}, "nowhere"),
        ({"wrapped": "m", "output_topic": "a b"}, "a b"),
        ({"wrapped": "m", "dead_letter_topic": "a b"}, "a b"),
    ],
)
def test_what_cannot_be_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(SeqdedupeError, match=said):
        settings_of(config)


def test_a_key_that_is_nearly_one_of_ours_is_told(caplog: pytest.LogCaptureFixture) -> None:
    settings_of({"wrapped": "m", "dead_leter_topic": "d"})
    assert "do you mean dead_letter_topic" in caplog.text


def test_a_function_that_is_deployed_as_it_should_be_is_taken() -> None:
    check_deployment(details())


@pytest.mark.parametrize(
    ("changes", "said", "hint"),
    [
        ({"processingGuarantees": 0}, "ATLEAST_ONCE", "processingGuarantees: MANUAL"),
        ({"processingGuarantees": 1}, "ATMOST_ONCE", "processingGuarantees: MANUAL"),
        ({"processingGuarantees": 2}, "EFFECTIVELY_ONCE", "processingGuarantees: MANUAL"),
        ({"retainOrdering": False}, "not Failover", "retainOrdering: true"),
        ({"source": source(timeoutMs=5000)}, "ack timeout of 5000 ms", "timeoutMs"),
        ({"source": source(topicsToSerDeClassName={TOPIC: "x.Y"})}, "SerDe", "input_serde"),
        *(
            ({"source": source(inputSpecs={TOPIC: SimpleNamespace(**spec)})}, said, hint)
            for spec, said, hint in (
                ({"isRegexPattern": True, "serdeClassName": "", "schemaType": ""}, "pattern", "Name each"),
                ({"isRegexPattern": False, "serdeClassName": "x.Y", "schemaType": ""}, "SerDe x.Y", "input_serde"),
                ({"isRegexPattern": False, "serdeClassName": "", "schemaType": "avro"}, "schema avro", "input_serde"),
            )
        ),
    ],
)
def test_a_deployment_that_would_lose_or_double_is_refused(changes: dict[str, Any], said: str, hint: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as failure:
        check_deployment(details(**changes))
    assert hint in failure.value.hint


def test_sequence_ids_rise_with_ledger_entry_and_place_in_the_batch() -> None:
    places = [(7, 0, -1), (7, 1, 0), (7, 1, 1), (7, 1, 999), (7, 2, -1)]
    ids = [identity.by_message_id("f", TOPIC, *place) for place in places]
    assert len({one.source for one in ids}) == 1
    assert [one.sequence_id for one in ids] == sorted({one.sequence_id for one in ids})
    assert identity.by_message_id("f", TOPIC, 8, 0, -1).source != ids[0].source


@pytest.mark.parametrize(("entry", "batch_index"), [(identity.MAX_ENTRY_ID + 1, -1), (0, 1 << 20), (-1, -1)])
def test_what_has_no_sequence_id_is_refused(entry: int, batch_index: int) -> None:
    with pytest.raises(SeqdedupeError, match="no sequence ID"):
        identity.by_message_id("f", TOPIC, 7, entry, batch_index)
    assert identity.by_message_id("f", TOPIC, 7, identity.MAX_ENTRY_ID, (1 << 20) - 1).sequence_id == 2**63 - 1


def test_an_index_is_an_identity_and_nothing_else_passes_for_one() -> None:
    place = EntryPlace.parse("1:99:3:00000000000000aa:5:4711", TOPIC)
    assert identity.by_index("f", TOPIC, place) == (f"f/{TOPIC}/99", 4711)
    wrong = ("", "4711", "1:99:3:aa:5:1", "1:99:3:00000000000000aa:5:-1", "1:x:3:00000000000000aa:5:1", "1:1:1:1:1:1:1")
    for entry in wrong:
        with pytest.raises(SeqdedupeError, match="written by no sidecar"):
            identity.by_index("f", TOPIC, EntryPlace.parse(entry, TOPIC))
    with pytest.raises(SeqdedupeError, match="version 3"):
        EntryPlace.parse("3:99:3:00000000000000aa:5:4711", TOPIC)


def test_names_that_could_become_too_long_are_refused_before_they_are() -> None:
    identity.check_names("public/default/f", TOPIC)
    with pytest.raises(SeqdedupeError, match="bytes long"):
        identity.check_names("public/default/f", TOPIC + "x" * 200)
