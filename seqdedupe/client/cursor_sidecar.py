"""A cursor that the sidecar keeps: named, of one topic, in the topic's log and the sidecar's store."""

from seqdedupe.client.calls import Calls
from seqdedupe.client.cursor import Cursor, Kept, check
from seqdedupe.errors import error
from seqdedupe.message_id import Position
from seqdedupe.names import topic_name
from seqdedupe.v1 import read_pb2


class SidecarCursor(Cursor):
    """A named cursor of a topic. Made by `Client.cursor`; who may read the topic moves those whose names are its own
    (docs/rules.md).

    Its calls wait for up to 30 seconds for a topic that recovers, or moves. Raises NotFoundError if there is no topic,
    INVALID_NAME, TOO_MANY_CURSORS, AccessDeniedError, UnavailableError (LOG_REFUSED, SHARE_EXCEEDED: it did not move).
    """

    def __init__(self, calls: Calls, topic: str, name: str) -> None:
        self.topic = topic_name(topic)
        self.name = name
        try:
            name.encode()
        except UnicodeEncodeError as e:
            raise error("INVALID_NAME", f"the name of a cursor {name[:80]!r} is not valid Unicode") from e
        self._calls = calls

    async def read(self) -> Kept | None:
        request = read_pb2.GetCursorRequest(topic=self.topic, name=self.name)
        answer = await self._calls.call(lambda sidecar: sidecar.read.GetCursor, request)
        if not answer.HasField("kept"):
            return None
        return Kept(Position.from_proto(answer.kept.position), answer.kept.note)

    async def compare_and_set(self, expected: Kept | None, new: Kept) -> None:
        check(new)
        request = read_pb2.MoveCursorRequest(topic=self.topic, name=self.name, new=_value(new))
        if expected is not None:
            request.expected.CopyFrom(_value(expected))
        await self._calls.call(lambda sidecar: sidecar.read.MoveCursor, request)


def _value(kept: Kept) -> read_pb2.CursorValue:
    return read_pb2.CursorValue(position=kept.position.to_proto(), note=kept.note)
