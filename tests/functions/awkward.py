"""Functions that are hard to serve."""

import threading
from typing import Any

import pulsar

from tests.functions.examples import Bad


class Untold(Exception):
    """An error without a text."""

    def __str__(self) -> str:
        return self.args[0]  # type: ignore[no-any-return]  # which is a number


class RaisesUntold(Bad):
    def bad(self, context: Any) -> bytes | None:
        raise Untold(7)


class ToItsOutputTopic(pulsar.Function):  # type: ignore[misc]
    """As functions do that know nothing of the wrapper."""

    def process(self, input: bytes, context: Any) -> None:
        context.publish(context.get_output_topic(), input)


class NumberSerDe:
    """`bytes` makes this many zeros of a number."""

    def serialize(self, value: object) -> object:
        return 5


class NoSuchSerDe(pulsar.Function):  # type: ignore[misc]
    def process(self, input: bytes, context: Any) -> None:
        context.publish(context.get_output_topic(), input, "tests.functions.awkward.Missing")


class CallsBackForever(pulsar.Function):  # type: ignore[misc]
    """Until it is released."""

    go_on = threading.Event()

    def process(self, input: bytes, context: Any) -> None:
        context.publish(context.get_output_topic(), input, callback=lambda result, message: self.go_on.wait())
