"""Functions that know nothing of the wrapper."""

import sys
import threading
from typing import Any, ClassVar

import pulsar


def process(payload: bytes) -> bytes:
    """The module as a function: a copy."""
    return payload


class Copy(pulsar.Function):  # type: ignore[misc]
    def process(self, input: bytes, context: Any) -> bytes:
        return input


class Three(pulsar.Function):  # type: ignore[misc]
    """Three outputs for each input, two topics."""

    def process(self, input: bytes, context: Any) -> bytes:
        context.publish("out", input + b"a")
        context.publish("other", input + b"b", properties={"own": "yes"}, message_conf={"partition_key": "k"})
        return input + b"c"


class Odd(pulsar.Function):  # type: ignore[misc]
    """Nothing for even numbers."""

    def process(self, input: bytes, context: Any) -> bytes | None:
        return input if int(input) % 2 else None


class OddElsewhere(pulsar.Function):  # type: ignore[misc]
    """Odd numbers go to another topic."""

    def process(self, input: bytes, context: Any) -> bytes | None:
        if int(input) % 2 == 0:
            return input
        context.publish("other", input)
        return None


class Fails(pulsar.Function):  # type: ignore[misc]
    """Always, on numbers in userConfig's `bad`, after it has published."""

    calls = 0

    def process(self, input: bytes, context: Any) -> bytes:
        Fails.calls += 1
        context.publish("other", input)
        if input.decode() in str(context.get_user_config_value("bad")).split(","):
            raise ValueError(f"bad {input.decode()}")
        return input


class Twice(pulsar.Function):  # type: ignore[misc]
    """Fails the first time."""

    seen: ClassVar[set[bytes]] = set()

    def process(self, input: bytes, context: Any) -> bytes:
        if input not in self.seen:
            self.seen.add(input)
            raise OSError("not yet")
        return input


class Late(pulsar.Function):  # type: ignore[misc]
    """Publishes after it has returned."""

    raised: ClassVar[list[Exception]] = []
    done = threading.Event()

    def process(self, input: bytes, context: Any) -> None:
        returned = threading.Event()

        def publish() -> None:
            returned.wait(120)
            try:
                context.publish("out", input)
            except Exception as e:  # noqa: BLE001
                self.raised.append(e)
            self.done.set()

        threading.Thread(target=publish).start()
        threading.Timer(0.2, returned.set).start()


class Large(pulsar.Function):  # type: ignore[misc]
    def process(self, input: bytes, context: Any) -> bytes:
        return bytes(6 * 1024 * 1024)


class Upper:
    """A SerDe."""

    def deserialize(self, payload: bytes) -> str:
        return payload.decode().upper()

    def serialize(self, value: str) -> bytes:
        return f"<{value}>".encode()


class Broken:
    def __init__(self) -> None:
        raise RuntimeError("no")


class Bad(pulsar.Function):  # type: ignore[misc]
    """A copy, but for the input `1`."""

    def process(self, input: bytes, context: Any) -> bytes | None:
        return self.bad(context) if input == b"1" else input

    def bad(self, context: Any) -> bytes | None:
        raise NotImplementedError


class Exits(Bad):
    def bad(self, context: Any) -> bytes | None:
        sys.exit("enough")


class Surrogates(Bad):
    def bad(self, context: Any) -> bytes | None:
        raise ValueError("\udcff")


class SurrogateProperty(Bad):
    def bad(self, context: Any) -> bytes | None:
        context.publish("other", b"", properties={"name": "\udcff"})
        return None


class SurrogateKey(Bad):
    def bad(self, context: Any) -> bytes | None:
        context.publish("other", b"", message_conf={"partition_key": "\udcff"})
        return None


class LateForever(Bad):
    """An event time that does not fit."""

    def bad(self, context: Any) -> bytes | None:
        context.publish("other", b"", message_conf={"event_timestamp": 2**63})
        return None


class CallsBackToExit(pulsar.Function):  # type: ignore[misc]
    def process(self, input: bytes, context: Any) -> None:
        context.publish("other", input, callback=lambda result, message: sys.exit("enough"))


class Many(pulsar.Function):  # type: ignore[misc]
    """As many outputs as the input says."""

    def process(self, input: bytes, context: Any) -> None:
        for _ in range(int(input)):
            context.publish(context.get_user_config_value("output_topic"), b"")
