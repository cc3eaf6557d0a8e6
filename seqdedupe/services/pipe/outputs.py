"""The results of a pipe's function: outputs with their sequence IDs, combined into frames that contain complete inputs.
No I/O."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, repeat
from typing import Any, NamedTuple

import numpy as np

from seqdedupe.batch import Binary
from seqdedupe.client.builder import BATCH_OVERHEAD_BYTES, PROPERTY_OVERHEAD_BYTES, ROW_OVERHEAD_BYTES, key_bytes
from seqdedupe.client.message import Message, StoredBatch
from seqdedupe.entry_properties import SCHEMA_VERSION_OF
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.limits import (
    MAX_BATCH_BYTES,
    MAX_EVENT_TIME_MS,
    MAX_PAYLOAD_BYTES,
    MAX_SEQUENCE_ID,
    MIN_EVENT_TIME_MS,
)

NUMBER_BITS = 10
"""The low bits of a sequence ID, which contain the output's number among the outputs of its input. The higher bits
contain the input's index."""

MAX_OUTPUTS = 1 << NUMBER_BITS
"""The largest number of outputs of one input."""

MAX_INPUT_INDEX = MAX_SEQUENCE_ID >> NUMBER_BITS

FULL_FRAME_BYTES = 128 * 1024
FULL_FRAME_ROWS = 4096
"""A frame with this number of rows accepts no further input, because a larger frame has no advantage."""


class Output(NamedTuple):
    """A message for the target. The key is bytes or text. The event time is in milliseconds since 1970; 0 means that
    the message has no event time."""

    payload: bytes | None
    key: bytes | str | None = None
    event_time_ms: int = 0
    properties: Mapping[str, str] = {}


Given = bytes | Output | Message
Function = Callable[[Message], Given | Iterable[Given] | None]
"""The function that a pipe calls for each message. It returns one output, several outputs, or None for no output. An
output may be bytes: a payload, which keeps the key of the input. An output may also be the message itself, which is
passed on with its payload, key, event time and properties."""


def index_of(sequence_id: int) -> int:
    """Return the index of the input whose output has this sequence ID."""
    return sequence_id >> NUMBER_BITS


class OutputBatch(NamedTuple):
    """The outputs of one or several complete inputs, as columns for `Producer.send_batch`."""

    payloads: Binary | list[bytes | None]
    sequence_ids: np.ndarray[tuple[int], np.dtype[np.int64]]
    keys: list[bytes | None] | None
    event_times_ms: np.ndarray[tuple[int], np.dtype[np.int64]] | None
    properties: list[Mapping[str, str] | None] | None


class Calling:
    """Calls the function for the messages of stored batches, in order, and divides the outputs into frames.

    After a message has failed, `failure` is set. Frames then contain the outputs before that message, and no outputs
    follow.
    """

    def __init__(self, function: Function, topic: str) -> None:
        self.failure: SeqdedupeError | None = None
        self.is_done = True
        """Whether the function has been called for all messages."""
        self.last: Message | None = None
        """If `is_done` is false: the last message whose outputs are all in a frame, as far as it is known."""
        self._is_due = False
        self._function = function
        self._topic = topic
        self._is_stopped = False
        self._held: tuple[list[Output], int] | None = None  # outputs that did not fit into the current frame
        self._messages: Iterator[tuple[Message, int, bytes | None]] = iter(())
        self._clear()

    def _clear(self) -> None:
        self._payloads: list[bytes | None] = []
        self._taken = 0  # the number of rows that are already in a frame
        self._is_adding = False  # true while the outputs of one input are added
        self._has_none = False
        self._sequence_ids: list[int] = []
        self._size_bytes = BATCH_OVERHEAD_BYTES
        # Indexed by row, for the rows that have the value.
        self._keys: dict[int, bytes] = {}
        self._event_times_ms: dict[int, int] = {}
        self._properties: dict[int, Mapping[str, str]] = {}

    def take(self, batches: Iterable[StoredBatch]) -> None:
        """Add the next batches. The caller ensures that all earlier batches are done."""
        self.is_done, self.last = False, None
        self._messages = chain.from_iterable(map(self._rows_of, batches))

    def _rows_of(self, stored: StoredBatch) -> Iterator[tuple[Message, int, bytes | None]]:
        """Return each message with the sequence ID of its first output, and with its key. Raises
        INVALID_SEQUENCE_ID."""
        past = stored.base_index + len(stored)
        if past > MAX_INPUT_INDEX:
            what = (
                f"message {past - 1} of {self._topic} has no sequence ID: indexes below {MAX_INPUT_INDEX} are possible"
            )
            hint = "The pipe ends here for good: publish what comes to a new source topic, and pipe that."
            raise error("INVALID_SEQUENCE_ID", what, hint=hint, index=past - 1)
        rows = range(len(stored))
        keys = stored.batch.keys.rows(len(stored)) if stored.batch.keys else repeat(None)
        ids = range(stored.base_index << NUMBER_BITS, past << NUMBER_BITS, MAX_OUTPUTS)
        return zip(map(Message, repeat(stored), rows), ids, keys, strict=False)

    def stop(self) -> None:
        """Start no further message. To be called from another thread."""
        self._is_stopped = self._is_due = True

    def hurry(self) -> None:
        """Make `fill` end after the current message. To be called from another thread."""
        self._is_due = True

    def fill(self) -> bool:
        """Call the function for the next messages. Return true if the frame is full or `hurry` was called, and false if
        no message is left. Any thread may call this."""
        # This loop determines the cost of a pipe per message, so it handles common outputs directly.
        if self._held is not None:
            held, self._held = self._held, None
            self._add_all(*held)
        function, payloads, sequence_ids = self._function, self._payloads, self._sequence_ids
        size_bytes = self._size_bytes
        self._is_due = self._is_stopped
        for message, sequence_id, key in self._messages:
            try:
                given = function(message)
                if type(given) is bytes and len(given) + (len(key) if key else 0) <= FULL_FRAME_BYTES:
                    if key is not None:
                        self._keys[len(payloads)] = key
                        size_bytes += len(key)
                    payloads.append(given)
                    sequence_ids.append(sequence_id)
                    size_bytes += len(given) + ROW_OVERHEAD_BYTES
                elif given is not None:
                    self._size_bytes = size_bytes
                    if not self._add_all(_outputs(given, key), sequence_id):
                        return True
                    size_bytes = self._size_bytes
            except Exception as e:  # noqa: BLE001 (any exception of the user's function)
                self.failure = self._failed(message, e)
                break
            if size_bytes >= FULL_FRAME_BYTES or len(payloads) >= FULL_FRAME_ROWS or self._is_due:
                self.last = message
                break
        else:
            self._size_bytes = size_bytes
            self.is_done = True
            return False
        self._size_bytes = size_bytes
        return self.failure is None

    def _failed(self, message: Message, why: Exception) -> SeqdedupeError:
        which = f"message {message.message_id} (index {message.index}) of {self._topic}"
        place: dict[str, Any] = {"topic": self._topic, "index": message.index, "message_id": message.message_id}
        if isinstance(why, _TooLarge) and why.size_bytes <= _size_bytes(_output(message, None)):
            size_bytes = BATCH_OVERHEAD_BYTES + why.size_bytes
            return error(
                "MESSAGE_TOO_LARGE",
                f"{which} cannot be passed on: with the names and numbers that the pipe adds, it has up to "
                f"{size_bytes} bytes, and a frame has at most {MAX_BATCH_BYTES}",
                hint="Let the function give less for that message, or nothing (None), and start the pipe again: it "
                "goes on with that message.",
                size_bytes=size_bytes,
                limit_bytes=MAX_BATCH_BYTES,
                **place,
            )
        try:
            text = f"{type(why).__name__}: {why}"
        except Exception:  # noqa: BLE001 (an error's text is the user's code too)
            text = type(why).__name__
        failure = error(
            "FUNCTION_FAILED",
            f"the pipe's function fails on {which}: {text}",
            hint="Correct the pipe's function, and start the pipe again. The pipe continues with that message.",
            **place,
        )
        failure.__cause__ = why
        return failure

    def _add_all(self, outputs: list[Output], sequence_id: int) -> bool:
        """Add all outputs of an input, or none. Return false if the outputs are kept for the next frame. Raises
        ValueError for outputs that cannot be published."""
        size_bytes = sum(map(_size_bytes, outputs))
        if BATCH_OVERHEAD_BYTES + size_bytes > MAX_BATCH_BYTES:
            raise _TooLarge(len(outputs), size_bytes)
        if self._size_bytes + size_bytes > MAX_BATCH_BYTES:
            self._held = outputs, sequence_id
            return False
        self._is_adding = True
        for number, output in enumerate(outputs):
            row = len(self._payloads)
            if output.key is not None:
                self._keys[row] = key_bytes(output.key) or b""
            if output.event_time_ms:
                self._event_times_ms[row] = output.event_time_ms
            if output.properties:
                self._properties[row] = output.properties
            self._has_none |= output.payload is None
            self._payloads.append(output.payload)
            self._sequence_ids.append(sequence_id + number)
        self._is_adding = False
        self._size_bytes += size_bytes
        return True

    def ready(self) -> OutputBatch | None:
        """Return the outputs of complete inputs so far. Another thread may call this while `fill` runs. This is safe,
        because `fill` only appends to the lists, and appends a row's sequence ID last."""
        count = len(self._sequence_ids)
        return None if self._is_adding or len(self._sequence_ids) != count else self._frame(count)

    def frame(self) -> OutputBatch | None:
        """Return the outputs that are not in any frame yet; None if all outputs are in a frame."""
        frame = self._frame(len(self._sequence_ids))
        self._clear()
        return frame

    def _frame(self, end: int) -> OutputBatch | None:
        rows = range(self._taken, end)
        if not rows:
            return None
        payloads = self._payloads[rows.start : end]
        self._taken = end
        times = None
        if self._event_times_ms:
            times = np.array([self._event_times_ms.get(row, 0) for row in rows], np.int64)
        return OutputBatch(
            payloads if self._has_none else Binary.of_all(payloads),  # type: ignore[arg-type]
            np.array(self._sequence_ids[rows.start : end], np.int64),
            [self._keys.get(row) for row in rows] if self._keys else None,
            times,
            [self._properties.get(row) for row in rows] if self._properties else None,
        )


class _TooLarge(ValueError):
    """The outputs of one input do not fit into one frame."""

    def __init__(self, outputs: int, size_bytes: int) -> None:
        super().__init__(
            f"its {counted(outputs, 'output takes', 'outputs take')} {size_bytes} bytes: "
            "all of them go in one frame of 8 MiB"
        )
        self.size_bytes = size_bytes


def _outputs(given: Any, key: bytes | None) -> list[Output]:
    """Return the result of a function as outputs. Raises ValueError for an invalid result."""
    if isinstance(given, bytes | Output | Message):
        return [_output(given, key)]
    if isinstance(given, str | Mapping) or not isinstance(given, Iterable):
        raise ValueError(f"it gives {type(given).__name__}, and not bytes, an Output, several of them, or None")
    outputs: list[Output] = []
    for one in given:
        if len(outputs) == MAX_OUTPUTS:
            raise ValueError(f"it gives more than {MAX_OUTPUTS:,} outputs")
        outputs.append(_output(one, key))
    return outputs


def _output(given: Any, key: bytes | None) -> Output:
    if isinstance(given, bytes):
        return Output(given, key)
    if isinstance(given, Message):
        # The schema version is valid only in the source. A consumer would look for this version in the target.
        properties = {name: value for name, value in given.properties.items() if name != SCHEMA_VERSION_OF}
        return Output(given.payload, given.key, given.event_time_ms, properties)
    if not isinstance(given, Output) or not isinstance(given.payload, bytes | None):
        what = "an Output with something else than bytes" if isinstance(given, Output) else type(given).__name__
        raise ValueError(f"it gives {what} among its outputs, and not bytes or an Output")
    return given


def _size_bytes(output: Output) -> int:
    """Return the size of an output in a frame. Raises ValueError for an output that is too large, and for an invalid
    key, time or property."""
    size = len(output.payload or b"")
    if size > MAX_PAYLOAD_BYTES:
        raise ValueError(f"an output's payload has {size} bytes: at most {MAX_PAYLOAD_BYTES} are taken")
    size += len(key_bytes(output.key) or b"") + ROW_OVERHEAD_BYTES
    # The client makes the same checks. Here they run before any other output of the input is accepted.
    time_ms = output.event_time_ms
    if not isinstance(time_ms, int) or not MIN_EVENT_TIME_MS <= time_ms <= MAX_EVENT_TIME_MS:
        raise ValueError(f"an output's event time is {time_ms!r}, and not milliseconds since 1970")
    for name, value in output.properties.items():
        size += len(name.encode()) + len(value.encode()) + PROPERTY_OVERHEAD_BYTES
    return size
