"""Messages that a job cannot write. They are stored in a separate table, in the same transaction that moves the
position past them."""

from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.message_id import MessageId
from seqdedupe_spark.message_columns import TIME, column_of

SUFFIX = "_dead_letters"
"""The suffix of the table of dead letters, after the name of the job's table."""

MAX_DEAD_LETTERS = 100
"""The default for the maximum number of dead letters in one transaction. More dead letters count as a fault of the
job."""

MAX_ERROR_CHARACTERS = 4_000

SCHEMA = pa.schema(
    {
        "job": pa.string(),
        "topic": pa.string(),
        "incarnation": pa.int64(),
        "index": pa.int64(),
        "message_id": pa.string(),
        "publish_time": TIME,
        "reason": pa.string(),
        "error": pa.string(),
        "key": pa.binary(),
        "value": pa.binary(),
    }
)
"""The columns of the table."""


Key = tuple[str, bytes]
"""A topic, and the encoding of a message ID."""


@dataclass
class DeadLetterRows:
    """The dead letters of one transaction while it is attempted. Messages that the store refused in an earlier attempt
    are remembered."""

    job: str
    most: int
    refused: dict[Key, SeqdedupeError] = field(default_factory=dict)
    ended: set[Key] = field(default_factory=set)
    """The refused messages that ended the connection. Their dead letters contain neither key nor value, which might end
    the connection again, for instance if they are too large for the server."""
    _letters: list[dict[str, object]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self._letters)

    def begin(self) -> None:
        """Begin another attempt of the transaction."""
        self._letters.clear()

    def bury(self, messages: pa.RecordBatch, row: int, why: SeqdedupeError) -> None:
        """Add a message to the dead letters. If there are too many, raise the error because of which the message cannot
        be written."""
        if len(self._letters) >= self.most:
            has = f"this transaction already has {counted(self.most, 'dead letter')}"
            what = f"{why.message}; {has}, and no more are allowed"
            raise error(why.reason, what, hint=why.hint, topic=why.numbers.get("topic")) from why
        letter = _letter(self.job, messages, row, why)
        key = (str(letter["topic"]), column_of(messages, "messageId")[row].as_py())
        self._letters.append(letter | {"key": None, "value": None} if key in self.ended else letter)

    def bury_refused(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        """Add the messages of a topic that the store has refused earlier to the dead letters. Return the other
        messages."""
        if not self.refused or not len(messages):
            return messages
        topic = column_of(messages, "topic")[0].as_py()
        of_topic = {one: why for (name, one), why in self.refused.items() if name == topic}
        ids = column_of(messages, "messageId")
        is_refused = pc.is_in(ids, value_set=pa.array(list(of_topic), pa.binary()))
        for row in np.flatnonzero(is_refused.to_numpy(zero_copy_only=False)).tolist():
            self.bury(messages, row, of_topic[ids[row].as_py()])
        return messages.filter(pc.invert(is_refused))

    def rows(self) -> pa.RecordBatch:
        """Return all dead letters, as rows of the table."""
        return pa.RecordBatch.from_pylist(self._letters, SCHEMA)


def _letter(job: str, messages: pa.RecordBatch, row: int, why: SeqdedupeError) -> dict[str, object]:
    columns = {
        "topic": "topic",
        "incarnation": "incarnation",
        "index": "index",
        "publish_time": "publishTime",
        "key": "key",
        "value": "value",
    }
    found = {name: column_of(messages, column)[row].as_py() for name, column in columns.items()}
    return found | {
        "job": job,
        "message_id": str(MessageId.from_bytes(column_of(messages, "messageId")[row].as_py())),
        "reason": why.reason,
        "error": _storable(why.message),
    }


def _storable(text: str) -> str:
    """Return the text in a form that databases accept: without NUL, and without surrogates, which no encoding can
    represent."""
    whole = text.encode(errors="backslashreplace").decode()
    return whole.replace("\0", "\\0")[:MAX_ERROR_CHARACTERS]
