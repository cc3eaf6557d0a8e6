"""Callers with narrow rights against a broker's topic, and against a producer, a reader and the topic that they share.

A part of `edges_campaign`. The oracle is what the victims see: verdicts, cursors, and all that an operator is shown.
"""

import random
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor

from broker_sidecar.security.permissions import request_class
from seqdedupe import wire
from seqdedupe.v1 import admin_pb2, publish_pb2, read_pb2
from tests.broker_sidecar import edge_sidecar
from tests.broker_sidecar.attach import Log, replay_of
from tests.broker_sidecar.attaching import Attaching, check
from tests.broker_sidecar.calls import DUP, NOT_DUP, TIMEOUT_SECONDS, batch, frame_bytes, status, verdicts
from tests.broker_sidecar.security.by_name import Caller, Ruled, call_as
from tests.broker_sidecar.security.showing import METHODS, is_served

RULES = """
[[allow]]
subjects = ["broker"]
actions = ["attach", "create"]
topics = ["*"]

[[allow]]
subjects = ["shop"]
actions = ["publish", "create", "observe"]
topics = ["*"]

[[allow]]
subjects = ["publisher"]
actions = ["publish"]
topics = ["*"]
producers = ["${sub}"]

[[allow]]
subjects = ["reader", "billing"]
actions = ["read"]
topics = ["*"]

[[allow]]
subjects = ["observer"]
actions = ["observe", "create"]
topics = ["*"]

[[allow]]
subjects = ["neighbour"]
actions = ["attach", "publish", "read", "administer", "create"]
topics = ["neighbour-*"]
"""
ATTACKERS = ("publisher", "reader", "observer", "neighbour", "stranger")
TOPIC, CURSOR, PRODUCER = "orders", "billing", "shop"
MAY_BE_ANSWERED = ("Get", "List", "Read", "Locate", "Export", "Open", "PublishStream")
"""Calls that change nothing, or are judged name by name, begin like this."""
NAMED = {
    "topic": TOPIC,
    "name": CURSOR,
    "producer_name": PRODUCER,
    "producer_names": PRODUCER,
    "namespace": "public/default",
}
"""Fields by which a request says whose it is."""
CALLS = {
    log: [
        f"/{one.containing_service.full_name}/{one.name}"
        for one in METHODS
        if is_served(one, log) and one.containing_service.full_name.startswith("seqdedupe.")
    ]
    for log in ("broker", "embedded")
}


def fill(message: Any, rng: random.Random, kept: read_pb2.CursorValue, depth: int = 0) -> None:
    """Makes a request about what the victims have: their names where there is a field for them, the rest at random."""
    for one in message.DESCRIPTOR.fields:
        if one.message_type is not None:
            if not one.is_repeated and depth < 3 and one.name != "start" and rng.random() < 0.7:
                if one.name == "expected":
                    message.expected.CopyFrom(kept)
                else:
                    getattr(message, one.name).SetInParent()
                    fill(getattr(message, one.name), rng, kept, depth + 1)
            continue
        number = rng.choice((0, 1, 7, 1000))
        value: Any = NAMED.get(one.name, rng.choice((TOPIC, PRODUCER, "")))
        if one.cpp_type == FieldDescriptor.CPPTYPE_STRING:
            value = value.encode() if one.type == FieldDescriptor.TYPE_BYTES else value
        elif one.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
            value = False
        elif one.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
            value = rng.choice(one.enum_type.values).number
        else:
            value = number
        if one.is_repeated:
            getattr(message, one.name).append(value)
        else:
            setattr(message, one.name, value)


class Broker:
    """A broker that keeps to its duty, with its log. One producer publishes to it."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.log = Log()
        self._channel = channel
        self.stream: Attaching | None = None
        self._reported = self._admitted = self._known = 0

    def attached(self) -> Attaching:
        """The attachment; made if there is none, and then the log is replayed."""
        if self.stream is None:
            self.stream = stream = Attaching(self._channel, TOPIC)
            stream.register(PRODUCER)
            assert stream.replay_after in [b"", *(at for _, at in self.log.entries)]
            if rows := self.log.after(stream.replay_after):
                stream.send(replay=replay_of(rows))
            stream.ready(self.log.last)
            self._reported = self._admitted = 0
            self._known = len(self.log.entries)
        return self.stream

    def go_on(self, rng: random.Random, *, is_reported: bool) -> None:
        """A copy of each of some messages, then a new one that is written."""
        stream = self.attached()
        for old in [*rng.choices(range(self._known), k=2), self._known - 1] if self._known else []:
            assert stream.judge((0, old)) == [DUP], f"{old} of {self._known} is no copy"
        new = len(self.log.entries)
        assert stream.judge((0, new)) == [NOT_DUP], f"{new} is not new"
        self.log.append(new)
        self._admitted += 1
        if is_reported:
            stream.report(self._reported, self._admitted - self._reported, self.log.last)
            self._reported, self._known = self._admitted, len(self.log.entries)

    def leave(self) -> None:
        if self.stream is not None:
            self.stream.end()
            self.stream = None


class CallersAttack:
    """Callers with narrow rights against a broker's topic, and against a producer, a reader and their topic. Each call
    of the schema is made with the victims' names, and anyone who may attach something has the broker's token."""

    def __init__(self, folder: Path, seed: int, bug: str = "") -> None:
        self._random = random.Random(seed)
        folders = {log: folder / log for log in ("broker", "embedded")}
        for one in folders.values():
            one.mkdir()
        self.sidecars = [
            Ruled(one, RULES, log=log, **edge_sidecar.settings(one, bug, is_ruled=True)) for log, one in folders.items()
        ]
        self._bought = 0
        """The number of messages that the shop has published, from ID 0 on."""
        self._kept = read_pb2.CursorValue()
        self.refused = 0

    def __enter__(self) -> "CallersAttack":
        of_broker, own = self.sidecars
        of_broker.start()
        own.start()
        self._callers = {name: (Caller(of_broker.address, name), Caller(own.address, name)) for name in ATTACKERS}
        self._operator = Caller(own.address, "operator")
        self._billing, self._shop = Caller(own.address, "billing"), Caller(own.address, PRODUCER)
        self._broker = Broker(call_as(of_broker.address, "broker"))
        self._epochs = self._shop.epochs(TOPIC, PRODUCER)
        return self

    def __exit__(self, *_: object) -> None:
        for sidecar in self.sidecars:
            sidecar.close()

    def case(self) -> str:
        """Return what was done: one attack on each of the two, and what the victims do then."""
        name = self._random.choice(ATTACKERS)
        of_broker, own = self._callers[name]
        is_away = self._random.random() < 0.5
        self._broker.go_on(self._random, is_reported=not is_away or self._random.random() < 0.5)
        if is_away:
            self._broker.leave()
        said = [self._attach(of_broker) if self._random.random() < 0.7 else self._call(of_broker, "broker")]
        self._broker.go_on(self._random, is_reported=True)
        self._buy()
        before = self._seen()
        said.append(self._call(own, "embedded") if self._random.random() < 0.6 else self._take(own))
        assert self._seen() == before, f"{name}, {said}"
        self._buy()
        return f"{name}, broker {'away' if is_away else 'there'}: {'; '.join(said)}"

    def _buy(self) -> None:
        """What the victims do all the time: a copy, a new message, a cursor that moves."""
        is_first = not self._bought
        if not is_first:
            again = batch([(PRODUCER, self._bought - 1)], self._epochs)
            assert list(self._shop.publish_unary(TOPIC, again).verdicts) == [DUP]
        receipt = self._shop.publish_unary(TOPIC, batch([(PRODUCER, self._bought)], self._epochs))
        assert verdicts(receipt, 1) == [NOT_DUP]
        self._bought += 1
        look = read_pb2.GetCursorRequest(topic=TOPIC, name=CURSOR)
        assert self._billing.reading.GetCursor(look).kept == self._kept
        new = read_pb2.CursorValue(position=self._shop.topic(TOPIC).last, note=f"{self._bought}")
        expected = None if is_first else self._kept
        move = read_pb2.MoveCursorRequest(topic=TOPIC, name=CURSOR, expected=expected, new=new)
        self._billing.reading.MoveCursor(move)
        self._kept = new

    def _seen(self) -> list[str]:
        """What an operator sees of the topic, but for what attackers have of their own."""
        admin, topic = self._operator.admin, self._operator.topic(TOPIC)
        producers = admin.ListProducers(admin_pb2.ListProducersRequest(topic=TOPIC)).producers
        cursors = admin.ListCursors(admin_pb2.ListCursorsRequest(topic=TOPIC)).cursors
        policy = admin.GetTopicPolicy(admin_pb2.GetTopicPolicyRequest(topic=TOPIC))
        theirs = [*producers, *(cursor for cursor in cursors if not cursor.name.startswith(ATTACKERS))]
        return [
            *map(str, theirs),
            str(policy),
            str(topic.last),
            str((topic.state, topic.first_index, topic.incarnation)),
        ]

    def _attempt(self, caller: Caller, path: str, *requests: bytes) -> str:
        """Make a call. Return its name, and why it was refused or that it was answered."""
        call: Any = caller.channel.stream_stream(path)
        try:
            for _ in call(iter(requests), timeout=TIMEOUT_SECONDS):
                pass
        except grpc.RpcError as e:
            self.refused += 1
            if (why := status(e)).reason == "INTERNAL":
                raise AssertionError(why) from e
            return f"{path.rpartition('/')[2]} {why.reason}"
        return f"{path.rpartition('/')[2]} answered"

    def _call(self, caller: Caller, log: str) -> str:
        """Any call, about what the victims have."""
        path = self._random.choice(CALLS[log])
        request = request_class(path)()
        fill(request, self._random, self._kept)
        said = self._attempt(caller, path, request.SerializeToString())
        assert not said.endswith("answered") or said.startswith(MAY_BE_ANSWERED), said
        return said

    def _take(self, caller: Caller) -> str:
        """Messages in the shop's name and session, and cursors: that of the reader, and as many as there are places."""
        frame = batch([(PRODUCER, self._bought)], self._epochs, payloads=[b"mine"])
        kind = self._random.choice(("publish", "stream", "move", "many"))
        if kind == "publish":
            head = publish_pb2.PublishRequest(topic=TOPIC).SerializeToString()
            request = b"".join([head, *wire.length_delimited(15, frame.SerializeToString())])
            return self._attempt(caller, "/seqdedupe.v1.PublishService/Publish", request)
        if kind == "stream":
            return self._attempt(caller, "/seqdedupe.v1.PublishService/PublishStream", frame_bytes(1, frame, TOPIC))
        names = [CURSOR] if kind == "move" else [f"{self._random.choice(ATTACKERS)}/{k}" for k in range(12)]
        new = read_pb2.CursorValue(note="mine")
        moves = [
            read_pb2.MoveCursorRequest(topic=TOPIC, name=name, new=new, expected=self._kept if name == CURSOR else None)
            for name in names
        ]
        path = "/seqdedupe.v1.ReadService/MoveCursor"
        return ", ".join(self._attempt(caller, path, move.SerializeToString()) for move in moves)

    def _attach(self, caller: Caller) -> str:
        """Attaches the broker's topic, or its own one with the broker's token, and then takes every step there is."""
        topic = self._random.choice((TOPIC, "persistent://public/default/orders", "neighbour-1"))
        name = self._random.choice((PRODUCER, "publisher"))
        stream = Attaching(caller.channel)
        try:
            stream.send(begin={"topic": topic})
            attached = stream.answer().attached
            known = self._broker.stream
            stream.token = known.token if known and self._random.random() < 0.5 else attached.token
            stream.register(name)
            stream.replay((0, 10**6, 10**6, self._broker.log.last), after=attached.replay_after)
            stream.ready(self._broker.log.last)
            stream.send(checks=[check((0, 10**6 + 1))])
            stream.report(0, 1, b"mine")
            stream.reset()
            stream.send(begin={"topic": TOPIC})
            stream.end()
        except grpc.RpcError as e:
            self.refused += 1
            return f"Attach {topic} {status(e).reason}"
        return f"Attach {topic} answered"


def attack_by_callers(folder: Path, cases: int, seed: int, bug: str = "") -> CallersAttack:
    """This many cases. Raises AssertionError, or RpcError at a victim, if there is harm."""
    with CallersAttack(folder, seed, bug) as attack:
        for number in range(cases):
            print(f"callers {number}: {attack.case()}", flush=True)
        assert attack._operator.rows(TOPIC) == [(PRODUCER, k) for k in range(attack._bought)]
    return attack
