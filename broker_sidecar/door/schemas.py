"""The schemas of stock producers.

- In a `native` topic of a Pulsar cluster, each entry names the version of its schema in the cluster's registry.
- A topic of another format has one schema, with which the sidecar's writer labels all messages. So a producer must have
  this schema or no schema.
- The sidecar's own log keeps no schemas. It accepts only messages that readers understand without a schema.
"""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from broker_sidecar.door.pulsar_codes import told
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.contract import AS_USUAL, Layout
from seqdedupe.log.pulsar.wholes import TYPES
from seqdedupe.pulsar_wire.pulsar_api_pb2 import (
    CommandGetOrCreateSchema,
    CommandGetOrCreateSchemaResponse,
    Schema,
    ServerError,
)
from seqdedupe.topic.topic import Topic

VERSION_BYTES = 8

NO_SCHEMA = b""

_NAMES = {kind: name for name, kind in TYPES.items()}
"""The names of schema types in Pulsar's admin URL, for the types that the sidecar's writer supports."""

_NEED_THEIR_SCHEMA = frozenset({"AVRO", "PROTOBUF"})
"""The types whose messages nobody can read without the schema."""


def has_schema(schema: Schema) -> bool:
    """Return whether this is a schema. A client's schema of bytes has a type without a name, and does not count as a
    schema."""
    return schema.type != Schema.Type.Value("None")


class DescribedSchema(NamedTuple):
    """A schema, as Pulsar's admin URL takes it."""

    type: str
    definition: str
    properties: dict[str, str]

    @property
    def text(self) -> str:
        """The form that `pulsar-admin schemas upload` takes."""
        return json.dumps({"type": self.type, "schema": self.definition, "properties": self.properties})


def described(schema: Schema) -> DescribedSchema:
    """Return a producer's schema. Raises INVALID_REQUEST for a type that the sidecar cannot name."""
    if (name := _NAMES.get(schema.type)) is None:
        what = f"a schema of type {Schema.Type.Name(schema.type)}"
        raise error("INVALID_REQUEST", f"the producer has {what}, which the door does not support", hint=_HINT)
    properties = {pair.key.decode(errors="replace"): pair.value.decode(errors="replace") for pair in schema.properties}
    return DescribedSchema(name, schema.schema_data.decode(errors="replace"), properties)


class SchemaRegistry(NamedTuple):
    """The schemas of a Pulsar cluster's topics."""

    upload: Callable[[str, str, str, Mapping[str, str]], Awaitable[int]]
    """Add a schema to a topic, by its type, definition and properties. Returns its version. Raises INVALID_REQUEST."""
    is_for_entries: bool
    """Whether each entry of a new topic can have a separate schema version. This is possible in the format `native`."""


def layout_for(schema: Schema, registry: SchemaRegistry | None) -> Layout:
    """Return the layout of a topic that is created for a producer with this schema. Without `registry`, the log keeps
    no schemas.

    Raises INVALID_REQUEST if the sidecar does not support such a schema, or if the log keeps no schemas and readers
    could not read the messages without the schema.
    """
    if not has_schema(schema):
        return AS_USUAL
    own = described(schema)
    if registry is None:
        _check_readable(own)
        return AS_USUAL
    # The other format without versions of entries, `packed`, has no schemas.
    return AS_USUAL if registry.is_for_entries else Layout("plain", own.text)


def _check_readable(schema: DescribedSchema) -> None:
    """Raise INVALID_REQUEST if readers could not read the messages on a log that keeps no schemas."""
    if schema.type in _NEED_THEIR_SCHEMA:
        what = f"has a schema of type {schema.type}, without which nobody can read its messages"
        raise error("INVALID_REQUEST", f"the producer {what}: the sidecar's own log keeps no schemas", hint=_HINT)


async def version_in(topic: Topic, schema: Schema, registry: SchemaRegistry | None) -> bytes:
    """Return the version of a producer's schema in its topic. Entries contain this version.

    Raises INVALID_REQUEST if the topic cannot have this schema, and the errors of the registry.
    """
    if not has_schema(schema):
        return NO_SCHEMA
    own = described(schema)
    if registry is None:
        _check_readable(own)
        return bytes(VERSION_BYTES)
    if topic.log.entry_format == "native":
        version = await registry.upload(topic.name, *own)
        return version.to_bytes(VERSION_BYTES)
    there = topic.log.schema
    if there is None:
        raise _differs(topic.name, "was created without a schema, and cannot get one")
    if own.type != there.type or _normal(own.definition) != _normal(there.definition):
        raise _differs(topic.name, f"has another schema, of type {there.type}: all its producers have the same one")
    return there.version.to_bytes(VERSION_BYTES)


async def answer_about(
    request: CommandGetOrCreateSchema, topic: Topic | None, registry: SchemaRegistry | None
) -> CommandGetOrCreateSchemaResponse:
    """Return the answer to a producer of this topic that requests the version of a schema."""
    answer = CommandGetOrCreateSchemaResponse(request_id=request.request_id)
    try:
        if topic is None:
            raise error("TOPIC_NOT_FOUND", f"this connection has no producer of topic {request.topic}")
        answer.schema_version = await version_in(topic, request.schema, registry)
    except SeqdedupeError as e:
        answer.error_code, answer.error_message = ServerError.IncompatibleSchema, told(e)
    return answer


def _normal(definition: str) -> object:
    """Parse a JSON definition, so that spaces and the order of members do not matter. Return any other definition
    unchanged."""
    try:
        return json.loads(definition)
    except ValueError:
        return definition


def _differs(topic: str, what: str) -> SeqdedupeError:
    return error(
        "INVALID_REQUEST", f"topic {topic} {what}", hint="Publish with the topic's schema, or without a schema."
    )


_HINT = "Publish bytes, and encode them in the producer."
