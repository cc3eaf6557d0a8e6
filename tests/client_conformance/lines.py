"""The harness's side of the line protocol (docs/guides/client-conformance.md): one program, and what it is asked."""

import base64
import itertools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PROTOCOL = 1
PATIENCE_SECONDS = 90.0
"""What a client has not done after this time it never does: a session's opening may take 30 seconds, and machines are
slow."""
_POLL_SECONDS = 0.02
_LINES_SHOWN = 30
_CHARACTERS_SHOWN = 200


class Client(NamedTuple):
    """A client under test: its name in the tests' names, the command of its program, and where it runs."""

    name: str
    command: Sequence[str]
    """Empty if the program is compiled first: the fixture `<name>_command` builds it."""
    folder: Path


class Message(NamedTuple):
    """What is sent, or was read. `id` is the sequence ID, or in bytes the deduplication ID."""

    id: int | bytes
    payload: bytes | None = b""
    key: bytes | None = None
    properties: tuple[tuple[str, str], ...] = ()
    event_time_ms: int = 0

    def members(self) -> dict[str, Any]:
        """The message as JSON."""
        made: dict[str, Any] = {"payload": None if self.payload is None else text_of(self.payload)}
        if isinstance(self.id, bytes):
            made["deduplication_id"] = text_of(self.id)
        else:
            made["sequence_id"] = str(self.id)
        if self.key is not None:
            made["key"] = text_of(self.key)
        if self.properties:
            made["properties"] = dict(self.properties)
        if self.event_time_ms:
            made["event_time_ms"] = str(self.event_time_ms)
        return made

    @staticmethod
    def of(members: dict[str, Any]) -> "Message":
        """The message that JSON is."""
        payload, key, one = members["payload"], members.get("key"), members.get("deduplication_id")
        return Message(
            int(members["sequence_id"]) if one is None else base64.b64decode(one),
            None if payload is None else base64.b64decode(payload),
            None if key is None else base64.b64decode(key),
            tuple(sorted(members.get("properties", {}).items())),
            int(members.get("event_time_ms", "0")),
        )


def text_of(data: bytes) -> str:
    """Bytes as the protocol writes them."""
    return base64.b64encode(data).decode()


def numbered(ids: Iterable[int]) -> list[Message]:
    """A message for each ID, whose payload says it."""
    return [Message(one, b"%d" % one) for one in ids]


class Command:
    """A command, and its answers so far."""

    def __init__(self, program: "Program", number: int, what: str) -> None:
        self._program = program
        self.number = number
        self.what = what
        self.is_accepted = False
        self.answer: dict[str, Any] | None = None
        self.is_expected_to_fail = False
        """Whether an error was asked for: any other one ends the scenario."""
        self.is_undecided = False
        """Whether the sidecar has said nothing yet that ends this command: an answer then ends the scenario."""

    def accepted(self) -> "Command":
        """Waits until the client has taken all messages of a `send`."""
        self._program.until(lambda: self.is_accepted or self.answer is not None, f"{self.what} is accepted")
        self._program.check()
        assert self.is_accepted, self._program.said(f"{self.what} was not accepted before its last answer")
        return self

    def ok(self) -> dict[str, Any]:
        """Waits for the last answer, which must be no error."""
        self._program.until(lambda: self.answer is not None, f"{self.what} is answered")
        assert self.answer is not None
        assert "ok" in self.answer, self._program.said(f"{self.what} has failed")
        result: dict[str, Any] = self.answer["ok"]
        return result

    def error(self, *reasons: str) -> str:
        """Waits for the last answer, which must be an error with one of these reasons."""
        self.is_expected_to_fail = True
        self._program.until(lambda: self.answer is not None, f"{self.what} fails")
        assert self.answer is not None
        assert "error" in self.answer, self._program.said(f"{self.what} should fail with {' or '.join(reasons)}")
        reason: str = self.answer["error"]["reason"]
        assert reason in reasons, self._program.said(f"{self.what} should fail with {' or '.join(reasons)}")
        return reason

    def receipts(self) -> list[tuple[int | bytes, str, int]]:
        """Waits for the receipts of a `send`: ID, verdict and index of each message."""
        return [
            (
                int(one["sequence_id"]) if "sequence_id" in one else base64.b64decode(one["deduplication_id"]),
                one["verdict"],
                int(one["index"]),
            )
            for one in self.ok()["receipts"]
        ]

    def messages(self) -> list[Message]:
        """Waits for what a `read` has read."""
        return [Message.of(one) for one in self.ok()["messages"]]


class Program:
    """A process that speaks the protocol. One thread of the harness commands it."""

    def __init__(self, client: Client, *more: str) -> None:
        self.client = client
        self._lines: list[str] = []
        self._commands: dict[int, Command] = {}
        self._numbers = itertools.count(1)
        self._changed = threading.Condition()
        self._has_ended = False
        self._process = subprocess.Popen(
            [*client.command, *more], cwd=client.folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        hello = self.call("hello")
        assert hello["protocol"] == PROTOCOL, self.said(f"this harness speaks version {PROTOCOL}")
        self._lacks = frozenset(hello["lacks"])

    def has(self, what: str) -> bool:
        """Whether the client does not lack this."""
        return what not in self._lacks

    def needs(self, what: str) -> None:
        """Skips the scenario if the client lacks this."""
        if not self.has(what):
            pytest.skip(f"{self.client.name} has no {what}")

    # -- Commands.

    def begin(self, do: str, on: str = "", **members: Any) -> Command:
        """Writes a command."""
        number = next(self._numbers)
        command = self._commands[number] = Command(self, number, f"{do} {on}".strip())
        line = json.dumps({"id": number, "do": do, **({"on": on} if on else {}), **members}, ensure_ascii=False)
        self._lines.append("→ " + line[:_CHARACTERS_SHOWN])
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except OSError as e:
            raise AssertionError(self.said("the program has ended")) from e
        return command

    def call(self, do: str, on: str = "", **members: Any) -> dict[str, Any]:
        """Writes a command, and waits until it is done."""
        return self.begin(do, on, **members).ok()

    def connect(self, *addresses: str) -> None:
        """A new client; what was before is forgotten."""
        self._commands.clear()
        del self._lines[:-1]
        self.call("connect", addresses=list(addresses))

    def opens(self, topic: str, on: str = "p", **members: Any) -> Command:
        """Begins to open a producer, whose name is that of the object."""
        return self.begin("open_producer", on, topic=topic, **({"producer_name": on} | members))

    def open(self, topic: str, on: str = "p", **members: Any) -> int:
        """Opens a producer, and returns its last sequence ID."""
        return int(self.opens(topic, on, **members).ok()["last_sequence_id"])

    def send(self, messages: Iterable[Message | int], on: str = "p") -> Command:
        """Begins to send these messages; one with this ID for a number."""
        made = [one if isinstance(one, Message) else numbered([one])[0] for one in messages]
        return self.begin("send", on, messages=[one.members() for one in made])

    def read_all(self, topic: str, on: str = "all") -> list[Message]:
        """All messages of a topic, whose indexes must rise one by one."""
        self.call("open_reader", on, topic=topic, start="earliest")
        answer = self.call("read", on, count=1_000_000)
        assert answer["ended"] is True, self.said("the reader has not ended at the end")
        indexes = [int(one["index"]) for one in answer["messages"]]
        assert indexes == [*range(indexes[0], indexes[0] + len(indexes))] if indexes else True, self.said("a gap")
        self.call("close", on)
        return [Message.of(one) for one in answer["messages"]]

    # -- Waiting.

    def until(self, is_so: Callable[[], bool], what: str) -> None:
        """Waits for something that this program or a server tells of."""
        ends = time.monotonic() + PATIENCE_SECONDS
        with self._changed:
            while not is_so():
                assert not self._has_ended, self.said(f"the program has ended before {what}")
                assert time.monotonic() < ends, self.said(f"after {PATIENCE_SECONDS:g} seconds, not: {what}")
                self._changed.wait(_POLL_SECONDS)

    def check(self) -> None:
        """Raises AssertionError if a command has failed that should not, or if the program has ended."""
        assert not self._has_ended, self.said("the program has ended")
        for command in [*self._commands.values()]:
            if command.answer is None:
                continue
            if "error" in command.answer and not command.is_expected_to_fail:
                raise AssertionError(self.said(f"{command.what} has failed"))
            if command.is_undecided:
                raise AssertionError(self.said(f"{command.what} was answered before its messages were decided"))

    def said(self, what: str) -> str:
        """The text of an assertion: what is wrong, and the lines that were exchanged."""
        return "\n".join([f"{self.client.name}: {what}", *self._lines[-_LINES_SHOWN:]])

    @property
    def runs(self) -> bool:
        return self._process.poll() is None and not self._has_ended

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._reader.join()
        with suppress(OSError):  # what is still to be written
            self._process.communicate()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._lines.append("← " + line.rstrip("\n")[:_CHARACTERS_SHOWN])
                self._take(line)
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def _take(self, line: str) -> None:
        try:
            answer = json.loads(line)
            command = self._commands.get(answer["id"])
        except (ValueError, KeyError, TypeError):
            self._lines.append("(this line is no answer)")
            self._has_ended = True
            return
        if command is None:
            return  # of an earlier client
        if "accepted" in answer:
            command.is_accepted = True
        else:
            command.answer = answer
