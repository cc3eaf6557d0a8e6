"""Stands for Pulsar's Python runtime in fast tests: one subscription with messages in order, and what is acknowledged.

What it does is what the real one was seen to do; `tests/pulsar/test_functions.py` has the real one.
"""

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pulsar

from seqdedupe.entry_properties import ENTRY, KIND
from seqdedupe.functions.instance import FunctionInstance
from seqdedupe.testing import LAST_RESORT_SECONDS

TOPIC = "persistent://public/default/in"
TIMEOUT_SECONDS = LAST_RESORT_SECONDS

MANUAL = 3


class Id:
    """As `_pulsar.MessageId`."""

    def __init__(self, entry_id: int, batch_index: int = -1, ledger_id: int = 7) -> None:
        self._parts = ledger_id, entry_id, batch_index

    def ledger_id(self) -> int:
        return self._parts[0]

    def entry_id(self) -> int:
        return self._parts[1]

    def batch_index(self) -> int:
        return self._parts[2]

    def __str__(self) -> str:
        return "({},{},-1,{})".format(*self._parts)


class Message:
    """An input."""

    def __init__(
        self,
        payload: bytes,
        message_id: Id,
        topic: str = TOPIC,
        *,
        key: str = "",
        event_time_ms: int = 0,
        properties: dict[str, str] | None = None,
    ) -> None:
        self.payload, self.message_id, self.topic = payload, message_id, topic
        self.key, self.event_time_ms, self.properties = key, event_time_ms, properties or {}

    def data(self) -> bytes:
        return self.payload


def inputs(count: int, first: int = 0) -> list[Message]:
    """Messages one entry each."""
    return [Message(b"%d" % i, Id(i)) for i in range(first, first + count)]


def written(index: int, kind: str = "", *, term: int = 3, incarnation: int = 99) -> dict[str, str]:
    """Properties of what a sidecar has written."""
    number = max(index, 0)
    properties = {ENTRY: f"1:{incarnation}:{term}:{term:016x}:{number}:{index}"}
    return properties | ({KIND: kind} if kind else {})


def details(**changes: Any) -> SimpleNamespace:
    """`FunctionDetails` of a function that is deployed as it should be."""
    values = {
        "tenant": "public",
        "namespace": "default",
        "name": "f",
        "processingGuarantees": MANUAL,
        "retainOrdering": True,
        "source": source(),
        "sink": SimpleNamespace(topic="out", serDeClassName="", schemaType=""),
    }
    return SimpleNamespace(**(values | changes))


def source(**changes: Any) -> SimpleNamespace:
    spec = SimpleNamespace(isRegexPattern=False, serdeClassName="", schemaType="")
    values: dict[str, Any] = {"timeoutMs": 0, "topicsToSerDeClassName": {}, "inputSpecs": {TOPIC: spec}}
    return SimpleNamespace(**(values | changes))


class Context(pulsar.Context):  # type: ignore[misc]
    """The context of a runtime's current message."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self.message: Any = None
        self.instance_config = SimpleNamespace(function_details=runtime.details)

    def get_message_id(self) -> Id:
        return self.message.message_id  # type: ignore[no-any-return]

    def get_message_key(self) -> str:
        return self.message.key  # type: ignore[no-any-return]

    def get_message_eventtime(self) -> int:
        return self.message.event_time_ms  # type: ignore[no-any-return]

    def get_message_properties(self) -> dict[str, str]:
        return self.message.properties  # type: ignore[no-any-return]

    def get_current_message_topic_name(self) -> str:
        return self.message.topic  # type: ignore[no-any-return]

    def get_user_config_map(self) -> Any:
        return self._runtime.user_config

    def get_user_config_value(self, key: str) -> Any:
        return self._runtime.user_config.get(key)

    def get_secret(self, secret_name: str) -> str | None:
        return self._runtime.secrets.get(secret_name)

    def get_input_topics(self) -> list[str]:
        return list(self._runtime.details.source.inputSpecs)

    def record_metric(self, metric_name: str, metric_value: float) -> None:
        self._runtime.on_metric(metric_name, metric_value)

    def ack(self, msgid: Id, topic: str) -> None:
        self._runtime.acknowledged(msgid, topic)


class Ended(BaseException):
    """The process would have ended here."""


class TestProcess:
    """A process that can be asked to stop; what ends it is reported to the test."""

    __test__ = False

    def __init__(self) -> None:
        self.is_stopping = False
        self.ended = threading.Event()
        self.why = ""
        self.failed = False

    def end(self, why: str, *, failed: bool) -> None:
        if not self.ended.is_set():
            self.why, self.failed = why, failed
            self.ended.set()
        raise Ended(why)


class Runtime:
    """An instance of a function with its subscription."""

    def __init__(self, address: str, wrapped: str, *, deployed: SimpleNamespace | None = None, **config: Any) -> None:
        self.details = deployed or details()
        self.user_config: dict[str, Any] = {"wrapped": wrapped, "sidecar_address": address, **config}
        self.secrets: dict[str, str] = {}
        self.on_metric: Callable[[str, float], object] = lambda name, value: None
        """Called in the instance's threads with what it records."""
        self.acks: list[tuple[str, Id]] = []
        self._acked = threading.Condition()
        self.process = TestProcess()
        self.instance: FunctionInstance | None = None

    def acknowledged(self, message_id: Id, topic: str) -> None:
        with self._acked:
            self.acks.append((topic, message_id))
            self._acked.notify_all()

    def give(self, messages: Sequence[Message]) -> None:
        """Calls the function with these. Raises Ended where the process would have."""
        for message in messages:
            context = Context(self)
            context.message = message
            if self.instance is None:
                self.instance = FunctionInstance(context, self.process)
            self.instance.take(context)

    def until_acknowledged(self, count: int) -> None:
        """Returns when this many messages are acknowledged."""
        self._until(lambda: len(self.acks) >= count)

    def _until(self, is_so: Callable[[], bool]) -> None:
        with self._acked:
            if not self._acked.wait_for(is_so, TIMEOUT_SECONDS):
                raise TimeoutError(f"{len(self.acks)} messages are acknowledged")

    @property
    def entries(self) -> list[int]:
        """The entries that were acknowledged, in order."""
        return [message_id.entry_id() for _, message_id in self.acks]
