"""The schema of a topic: what consumers of Pulsar's own clients decode its messages by. Pulsar keeps it."""

import json
from typing import NamedTuple

import _pulsar
import pulsar.schema

from seqdedupe.errors import NotFoundError, error
from seqdedupe.log.pulsar.admin import Admin

TYPES = ("AVRO", "JSON", "PROTOBUF", "STRING", "INT8", "INT16", "INT32", "INT64", "FLOAT", "DOUBLE")
"""The client has names for them, and sends their definitions as the admin URL answers them."""


class Schema(NamedTuple):
    """A schema as the admin URL takes it."""

    type: str
    definition: str
    """Empty for types that need none."""
    properties: dict[str, str]

    def of_client(self) -> pulsar.schema.Schema:
        """The same for a producer of the client's, which is given encoded messages."""
        return _OfBytes(_pulsar.SchemaInfo(_pulsar.SchemaType.__members__[self.type], self.type, self.definition))


class _OfBytes(pulsar.schema.Schema):  # type: ignore[misc]  # the library has no types
    def __init__(self, info: _pulsar.SchemaInfo) -> None:
        # As the library's own classes do, which make a definition of a class of Python's.
        self._schema_info = info


def parse(text: str) -> Schema:
    """Return the schema that a caller gives, in the form that `pulsar-admin schemas upload` takes.

    Raises INVALID_REQUEST.
    """
    try:
        given = json.loads(text)
        kind, definition = given["type"], given.get("schema", "")
        properties = dict(given.get("properties") or {})
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise _invalid(f"it should be a JSON object with `type`, `schema` and `properties`: {e!r}") from e
    if kind not in TYPES:
        raise _invalid(f"its type is {kind!r}: it should be one of {', '.join(TYPES)}")
    if not all(isinstance(one, str) for one in (definition, *properties.values())):
        raise _invalid("`schema` and the values of `properties` should be text")
    return Schema(kind, definition, properties)


def _invalid(why: str) -> Exception:
    hint = "Give what `pulsar-admin schemas upload` takes, as a text of JSON."
    return error("INVALID_REQUEST", f"schema: {why}", hint=hint)


async def schema_of(topic: str, admin: Admin) -> Schema:
    """Return the newest schema of a topic that was created with one. Raises LOG_REFUSED if Pulsar has none."""
    try:
        type_name, definition = await admin.schema(topic)
    except NotFoundError as e:
        raise error(
            "LOG_REFUSED",
            f"{topic} was created with a schema, and Pulsar has none of it now",
            hint=f"Upload it again: pulsar-admin schemas upload --filename FILE {topic}",
        ) from e
    if type_name not in TYPES:
        raise error("LOG_REFUSED", f"the schema of {topic} is of type {type_name}, which a sidecar cannot name")
    return Schema(type_name, definition, {})
