"""Which topics can be made at a cluster, as far as no broker has to say it."""

import json
from typing import Any

import pytest

from seqdedupe.errors import InvalidRequestError
from seqdedupe.log.contract import Layout
from seqdedupe.log.pulsar.admin_url import AdminUrl, PulsarAdmin
from seqdedupe.log.pulsar.entries import EntryFormat
from seqdedupe.log.pulsar.logs import PulsarLogs
from tests.log.pulsar.test_log import StandInHarness

NAMESPACES = ["public/default", "pulsar/system"]
DEFAULT = "persistent://public/default/"


class Asked(Exception):
    """A call of the admin URL."""


class _Url(AdminUrl):
    def __init__(self) -> None:
        super().__init__("http://localhost")

    async def call(self, method: str, path: str, *_: Any, **__: Any) -> Any:
        raise Asked(path)


def logs(entry_format: EntryFormat = EntryFormat.PLAIN) -> PulsarLogs:
    """Those of a cluster that nothing may be asked of."""
    shared = StandInHarness(entry_format).shared("host:6680")
    shared.admin = PulsarAdmin(_Url())
    return PulsarLogs(shared, NAMESPACES, entry_format, may_change_policies=True)


@pytest.mark.parametrize(
    "topic",
    [
        DEFAULT + "__change_events",
        DEFAULT + "__change_events-partition-0",
        DEFAULT + "__transaction_buffer_snapshot",
        DEFAULT + "__transaction_buffer_snapshot_segments",
        DEFAULT + "__transaction_buffer_snapshot_indexes",
        DEFAULT + "__transaction_log_0",
        DEFAULT + "__consumer_offsets",
        DEFAULT + "__consumer_offsets-partition-7",
        DEFAULT + "orders-billing__transaction_pending_ack",
        DEFAULT + "transaction_coordinator_assign",
        "persistent://pulsar/system/loadbalancer-service-unit-state",
    ],
)
@pytest.mark.parametrize("partitions", [0, 3])
async def test_no_log_is_made_of_a_system_topic(topic: str, partitions: int) -> None:
    with pytest.raises(InvalidRequestError, match=f"^{topic} has the name of a system topic") as e:
        await logs().create(1, topic, b"", partitions)
    assert e.value.reason == "INVALID_TOPIC_NAME"


@pytest.mark.parametrize("name", ["orders__", "my__change_events", "_change_events", "a-__b"])
async def test_other_names_are_free(name: str) -> None:
    with pytest.raises(Asked):
        await logs().create(1, DEFAULT + name, b"")


AVRO = {"type": "AVRO", "schema": '{"type": "record", "name": "P", "fields": []}', "properties": {}}


@pytest.mark.parametrize(
    ("schema", "why"),
    [
        ("no JSON", "it should be a JSON object"),
        ("[]", "it should be a JSON object"),
        ("{}", "it should be a JSON object"),
        (json.dumps(AVRO | {"type": "KEY_VALUE"}), "its type is 'KEY_VALUE'"),
        (json.dumps(AVRO | {"type": ["AVRO"]}), "its type is"),
        (json.dumps(AVRO | {"schema": {"type": "record"}}), "should be text"),
        (json.dumps(AVRO | {"properties": ["a"]}), "it should be a JSON object"),
        (json.dumps(AVRO | {"properties": {"a": 1}}), "should be text"),
    ],
)
async def test_a_schema_that_is_none_is_refused_before_anything_is_made(schema: str, why: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"schema.*{why}") as e:
        await logs().create(1, DEFAULT + "t", b"", layout=Layout(schema=schema))
    assert e.value.reason == "INVALID_REQUEST"


@pytest.mark.parametrize(
    ("default", "asked"),
    [(EntryFormat.PACKED, ""), (EntryFormat.PLAIN, "packed")],
    ids=["by default", "as asked"],
)
async def test_packed_entries_have_no_schema(default: EntryFormat, asked: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot have a schema: its entries are packed"):
        await logs(default).create(1, DEFAULT + "t", b"", layout=Layout(asked, json.dumps(AVRO)))


async def test_a_topic_with_a_schema_has_plain_entries_unless_others_are_asked_for() -> None:
    typed = json.dumps(AVRO)
    with pytest.raises(Asked):
        await logs(EntryFormat.NATIVE).create(1, DEFAULT + "t", b"", layout=Layout("", typed))
    with pytest.raises(InvalidRequestError, match="cannot have a schema: its entries are native"):
        await logs(EntryFormat.NATIVE).create(1, DEFAULT + "t", b"", layout=Layout("native", typed))
