"""The program of the Python clients: `--blocking` for the one for threads, `--fault NAME` for a deliberately wrong one.

A program in another language needs a queue for each object, one function for each command, and the values' forms.
"""

import argparse
import asyncio
import base64
import contextlib
import inspect
import itertools
import json
import os
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from seqdedupe import client as for_asyncio
from seqdedupe.client import Kept, Message, MessageId, Position, ProducerConfig, Published, SeqdedupeError
from seqdedupe.client import blocking as for_threads
from tests.client_conformance import faults

Members = dict[str, Any]

THREADS = 256
"""Each call that waits has one, with the client for threads."""


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def id_form(message_id: MessageId | None) -> list[Any] | None:
    if message_id is None:
        return None
    return [str(message_id.ledger_id), str(message_id.entry_id), message_id.batch_index]


def receipt_form(one: Published, message: Members) -> Members:
    name = "sequence_id" if "sequence_id" in message else "deduplication_id"
    outcome = {"verdict": one.verdict.name, "index": str(one.index), "message_id": id_form(one.message_id)}
    return {name: message[name]} | outcome


def message_form(message: Message) -> Members:
    made: Members = {
        "index": str(message.index),
        "producer_name": message.producer_name,
        "sequence_id": str(message.sequence_id),
        "payload": None if message.payload is None else text_of(message.payload),
        "position": text_of(message.position.to_bytes()),
        "message_id": id_form(message.message_id),
        "properties": message.properties,
        "event_time_ms": str(message.event_time_ms),
    }
    if message.key is not None:
        made["key"] = text_of(message.key)
    if message.deduplication_id:
        made["deduplication_id"] = text_of(message.deduplication_id)
    return made


def kept_of(members: Members | None) -> Kept | None:
    return (
        None if members is None else Kept(Position.from_bytes(base64.b64decode(members["position"])), members["note"])
    )


def columns_of(message: Members) -> Members:
    """Of a message to send: what both kinds of publishing take."""
    key, event_time = message.get("key"), message.get("event_time_ms")
    return {
        "payload": None if message["payload"] is None else base64.b64decode(message["payload"]),
        "key": None if key is None else base64.b64decode(key),
        "properties": message.get("properties"),
        "event_time": None if event_time is None else int(event_time),
    }


def _same(receipt: Awaitable[Published]) -> Awaitable[Published]:
    return receipt


class Program:
    """One client at a time, and its objects by their names."""

    def __init__(self, is_blocking: bool) -> None:
        self._is_blocking = is_blocking
        self._client: Any = None
        self._objects: dict[str, Any] = {}
        self._queues: dict[str, asyncio.Queue[Members]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(THREADS))
        with ThreadPoolExecutor(1) as stdin:
            while line := await loop.run_in_executor(stdin, sys.stdin.readline):
                command = json.loads(line)
                if command["do"] == "connect":
                    await self._connect(command)
                    continue
                on = command.get("on", "")
                if on not in self._queues:
                    self._queues[on] = asyncio.Queue()
                    self._start(self._work(self._queues[on]))
                self._queues[on].put_nowait(command)
            os._exit(0)

    def _start(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _work(self, queue: asyncio.Queue[Members]) -> None:
        """Does the commands of one object in their order."""
        while True:
            command = await queue.get()
            if command["do"] == "send":
                await self._send(command, self._objects[command["on"]])
            else:
                await self._answer(command, getattr(self, "_do_" + command["do"])(command, command.get("on", "")))

    async def _answer(self, command: Members, result: Awaitable[Members | None]) -> None:
        try:
            last: Members = {"ok": await result or {}}
        except SeqdedupeError as e:
            last = {"error": {"reason": e.reason, "message": e.message}}
        self._print(command, last)

    def _print(self, command: Members, answer: Members) -> None:
        print(json.dumps({"id": command["id"]} | answer), flush=True)

    async def _call(self, call: Callable[..., Any], *given: Any, **named: Any) -> Any:
        """Calls the client, in a thread if it is the one for threads."""
        if self._is_blocking:
            return await asyncio.to_thread(call, *given, **named)
        result = call(*given, **named)
        return await result if inspect.isawaitable(result) else result

    # -- The commands.

    async def _connect(self, command: Members) -> None:
        for task in self._tasks:
            task.cancel()
        objects, self._objects, self._queues = self._objects, {}, {}
        for one in objects.values():
            with contextlib.suppress(SeqdedupeError):
                await self._call(one.abort if hasattr(one, "abort") else one.close)
        if self._client is not None:
            await self._call(self._client.close)
        self._client = (for_threads if self._is_blocking else for_asyncio).Client(command["addresses"])
        self._print(command, {"ok": {}})

    async def _do_hello(self, _: Members, __: str) -> Members:
        return {"protocol": 1, "client": "python, for threads" if self._is_blocking else "python", "lacks": []}

    async def _do_open_producer(self, command: Members, on: str) -> Members:
        config: Members = {}
        if "delivery_timeout_ms" in command:
            config["delivery_timeout_seconds"] = int(command["delivery_timeout_ms"]) / 1000
        if "max_in_flight_bytes" in command:
            config["max_in_flight_bytes"] = int(command["max_in_flight_bytes"])
        producer = self._client.producer(command["topic"], command["producer_name"], ProducerConfig(**config))
        self._objects[on] = producer
        await self._call(producer.open)
        return {"last_sequence_id": str(producer.last_sequence_id)}

    async def _do_open_publisher(self, command: Members, on: str) -> None:
        timeout = int(command.get("delivery_timeout_ms", 120_000)) / 1000
        publisher = self._client.publisher(command["topic"], delivery_timeout_seconds=timeout)
        await self._call(publisher.__enter__ if self._is_blocking else publisher.__aenter__)
        self._objects[on] = publisher

    async def _send(self, command: Members, sender: Any) -> None:
        """Returns when the client has all messages; the receipts are waited for in another task."""
        messages, waits = command["messages"], []
        try:
            for one in messages:
                columns = columns_of(one)
                if "sequence_id" in one:
                    number = int(one["sequence_id"])
                    receipt = await self._call(sender.send, columns.pop("payload"), number, **columns)
                    waits.append(partial(self._call, receipt.result) if self._is_blocking else partial(_same, receipt))
                else:
                    id_bytes = base64.b64decode(one["deduplication_id"])
                    call = self._call(sender.send, columns.pop("payload"), deduplication_id=id_bytes, **columns)
                    waits.append(partial(_same, asyncio.create_task(call)))
        except SeqdedupeError as e:
            self._print(command, {"error": {"reason": e.reason, "message": e.message}})
            return
        self._print(command, {"accepted": True})

        async def receipts() -> Members:
            return {"receipts": [receipt_form(await wait(), one) for wait, one in zip(waits, messages, strict=True)]}

        self._start(self._answer(command, receipts()))

    async def _do_flush(self, _: Members, on: str) -> None:
        await self._call(self._objects[on].flush)

    async def _do_close(self, _: Members, on: str) -> None:
        await self._call(self._objects.pop(on).close)

    async def _do_open_reader(self, command: Members, on: str) -> None:
        start, stop = command["start"], command.get("stop_index")
        if isinstance(start, dict):
            at = start.get("position")
            start = int(start["index"]) if at is None else Position.from_bytes(base64.b64decode(at))
        self._objects[on] = self._client.reader(
            command["topic"],
            start,
            follow=command.get("follow", False),
            stop_index=None if stop is None else int(stop),
        )

    async def _do_read(self, command: Members, on: str) -> Members:
        reader, count = self._objects[on], int(command["count"])
        messages: list[Message] = []
        if self._is_blocking:
            messages = await asyncio.to_thread(lambda: list(itertools.islice(reader, count)))
        else:
            while len(messages) < count and (message := await anext(reader, None)) is not None:
                messages.append(message)
        return {"messages": [message_form(one) for one in messages], "ended": len(messages) < count}

    async def _do_ends(self, command: Members, _: str) -> Members:
        ends = await self._call(self._client.ends, command["topic"])
        return {"first_index": str(ends.first_index), "last_index": str(ends.last.index)}

    async def _do_get_cursor(self, command: Members, _: str) -> Members:
        kept = await self._call(self._client.cursor(command["topic"], command["name"]).read)
        return {"kept": kept and {"position": text_of(kept.position.to_bytes()), "note": kept.note}}

    async def _do_move_cursor(self, command: Members, _: str) -> None:
        cursor = self._client.cursor(command["topic"], command["name"])
        await self._call(cursor.compare_and_set, kept_of(command["expected"]), kept_of(command["new"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--blocking", action="store_true")
    parser.add_argument("--fault", choices=faults.FAULTS)
    options = parser.parse_args()
    if options.fault:
        faults.FAULTS[options.fault]()
    asyncio.run(Program(options.blocking).run())
