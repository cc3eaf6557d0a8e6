"""The program of tests/schema_client.py: a client in nothing but the published schema, with one thread per object."""

import base64
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc

from seqdedupe.v1 import batch_pb2, publish_pb2, read_pb2, read_pb2_grpc
from tests.schema_client import OPTIONS, AgainError, FinalError, Message, SchemaClient, of_call, rows_of

Members = dict[str, Any]

_POLL_SECONDS = 0.002


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def id_form(one: batch_pb2.MessageId | None) -> list[Any] | None:
    return one and [str(one.ledger_id), str(one.entry_id), one.batch_index]


def message_of(members: Members) -> Message:
    payload, key = members["payload"], members.get("key")
    return Message(
        int(members["sequence_id"]),
        None if payload is None else base64.b64decode(payload),
        None if key is None else base64.b64decode(key),
        members.get("properties", {}),
        int(members.get("event_time_ms", 0)),
    )


class Producer:
    """A session in its own thread."""

    def __init__(self, address: str, command: Members) -> None:
        timeout_seconds = int(command.get("delivery_timeout_ms", 900_000)) / 1000
        self.client = SchemaClient(address, command["topic"], command["producer_name"], timeout_seconds)
        self.limit_bytes = int(command.get("max_in_flight_bytes", 16 * 1024 * 1024))
        self.last = -1
        self.is_closed = False
        threading.Thread(target=self._run, daemon=True).start()
        self.until(lambda: bool(self.client.epochs))

    def _run(self) -> None:
        with suppress(FinalError):
            self.client.run(lambda: self.is_closed)

    def until(self, is_so: Any) -> None:
        """Raises FinalError."""
        while not is_so():
            if self.client.failure is not None:
                raise self.client.failure
            time.sleep(_POLL_SECONDS)

    def in_flight_bytes(self) -> int:
        return sum(len(one.payload or b"") for one in [*self.client.waiting.values()])

    def send(self, messages: list[Message]) -> None:
        for one in messages:
            if one.id <= self.last:
                raise FinalError("NOT_ASCENDING", f"{one.id} is not above {self.last}")
            self.until(lambda: self.in_flight_bytes() < self.limit_bytes)
            if self.client.failure is not None:
                raise self.client.failure
            self.last = one.id
            self.client.add([one])

    def receipts(self, messages: list[Message]) -> Members:
        while any(one.id in self.client.waiting for one in messages):
            time.sleep(_POLL_SECONDS)
        if self.client.failure is not None and any(one.id not in self.client.receipts for one in messages):
            raise self.client.failure
        found = [(one.id, self.client.receipts[one.id]) for one in messages]
        return {
            "receipts": [
                {
                    "sequence_id": str(i),
                    "verdict": publish_pb2.Verdict.Name(one.verdict).removeprefix("VERDICT_"),
                    "index": str(one.at_index),
                    "message_id": id_form(one.message_id),
                }
                for i, one in found
            ]
        }


class Reader:
    """Reads on after what it has read, however often the connection breaks."""

    def __init__(self, address: str, command: Members) -> None:
        self._address, self._command, self._stop = address, command, int(command.get("stop_index", 0))
        self.is_closed = False
        start = command["start"]
        self._start = read_pb2.ReadStart(earliest=True) if start == "earliest" else read_pb2.ReadStart(latest=True)
        if isinstance(start, dict):
            position = start.get("position")
            self._start = (
                read_pb2.ReadStart(index=int(start["index"]))
                if position is None
                else read_pb2.ReadStart(after=batch_pb2.Position.FromString(base64.b64decode(position)))
            )
        self.messages = self._read()

    def _read(self) -> Iterator[Members]:
        ends = {"follow": True} if self._command.get("follow") else {"stop_index": self._stop} if self._stop else {}
        while True:
            with grpc.insecure_channel(self._address, OPTIONS) as channel:
                request = read_pb2.ReadStreamRequest(topic=self._command["topic"], start=self._start, **ends)
                try:
                    for answer in read_pb2_grpc.ReadServiceStub(channel).ReadStream(request):
                        for record in answer.records:
                            yield from self._of(record)
                    if not ends.get("follow"):
                        return
                except grpc.RpcError as e:
                    why = of_call(e)
                    if not isinstance(why, AgainError):
                        raise why from e
                    if self.is_closed:
                        return
                    time.sleep(why.delay_ms / 1000)

    def _of(self, record: batch_pb2.Record) -> Iterator[Members]:
        for row, (name, one) in enumerate(rows_of(record.batch)):
            index = record.base_index + row
            message_id = batch_pb2.MessageId(ledger_id=record.incarnation, entry_id=index, batch_index=-1)
            position = batch_pb2.Position(incarnation=record.incarnation, message_id=message_id, index=index)
            self._start = read_pb2.ReadStart(after=position)
            yield {
                "index": str(index),
                "producer_name": name,
                "sequence_id": str(one.id),
                "payload": None if one.payload is None else text_of(one.payload),
                "position": text_of(position.SerializeToString()),
                "message_id": id_form(message_id),
                "properties": one.properties,
                "event_time_ms": str(one.event_time_ms),
                **({} if one.key is None else {"key": text_of(one.key)}),
            }


class Program:
    """One client, and its objects by their names."""

    def __init__(self) -> None:
        self.address = ""
        self.objects: dict[str, Any] = {}

    def do(self, command: Members) -> Members:
        kind, on = command["do"], command.get("on", "")
        if kind == "hello":
            return {"protocol": 1, "client": "schema", "lacks": ["publisher", "cursors", "redirects"]}
        if kind == "open_producer":
            producer = self.objects[on] = Producer(self.address, command)
            return {"last_sequence_id": str(producer.client.persisted)}
        if kind == "open_reader":
            self.objects[on] = Reader(self.address, command)
        elif kind == "read":
            messages = [one for _, one in zip(range(command["count"]), self.objects[on].messages, strict=False)]
            return {"messages": messages, "ended": len(messages) < command["count"]}
        elif kind in ("flush", "close") and isinstance(one := self.objects[on], Producer):
            one.until(lambda: not one.client.waiting)
            one.is_closed = kind == "close"
        elif kind == "ends":
            with grpc.insecure_channel(self.address, OPTIONS) as channel:
                request = read_pb2.GetLastMessageIdRequest(topic=command["topic"])
                ends = read_pb2_grpc.ReadServiceStub(channel).GetLastMessageId(request, timeout=30)
                return {"first_index": str(ends.first_index), "last_index": str(ends.last.index)}
        return {}

    def work(self, commands: "queue.SimpleQueue[Members]") -> None:
        """Does the commands of one object in their order."""
        while True:
            command = commands.get()
            if command["do"] != "send":
                answer(command, lambda command=command: self.do(command))
                continue
            producer, messages = self.objects[command["on"]], [message_of(one) for one in command["messages"]]
            try:
                producer.send(messages)
            except FinalError as e:
                tell(command, {"error": {"reason": e.reason, "message": str(e)}})
                continue
            tell(command, {"accepted": True})
            act = lambda producer=producer, messages=messages: producer.receipts(messages)  # noqa: E731
            threading.Thread(target=answer, args=(command, act), daemon=True).start()


LOCK = threading.Lock()


def tell(command: Members, members: Members) -> None:
    with LOCK:
        print(json.dumps({"id": command["id"]} | members), flush=True)


def answer(command: Members, act: Any) -> None:
    try:
        tell(command, {"ok": act()})
    except FinalError as e:
        tell(command, {"error": {"reason": e.reason, "message": str(e)}})


if __name__ == "__main__":
    program, queues = Program(), dict[str, queue.SimpleQueue[Members]]()
    for line in sys.stdin:
        members = json.loads(line)
        if members["do"] == "connect":
            for one in program.objects.values():
                one.is_closed = True
            program, queues = Program(), {}
            program.address = members["addresses"][0]
            tell(members, {"ok": {}})
            continue
        on = members.get("on", "")
        if on not in queues:
            queues[on] = queue.SimpleQueue()
            threading.Thread(target=program.work, args=(queues[on],), daemon=True).start()
        queues[on].put(members)
    os._exit(0)
