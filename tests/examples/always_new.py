"""The broker of `examples/broker` without its sidecar: to it every message is new. A control arm of the crash tests."""

import asyncio
from collections.abc import Sequence
from typing import Any

from examples.broker import broker
from seqdedupe.client import BrokerClient, Range, Verdict
from seqdedupe.errors import SeqdedupeError


class NoAttachment:
    """Answers NOT_DUP."""

    ended: SeqdedupeError | None = None

    async def check(self, ranges: Sequence[Range]) -> list[Verdict]:
        return [Verdict.NOT_DUP] * len(ranges)

    async def wait_until_ended(self) -> None:
        await asyncio.Event().wait()

    def persisted(self, position: bytes, count: int) -> None:
        pass

    def release(self, name: str) -> None:
        pass


async def attach(*_: Any, **__: Any) -> Any:
    return NoAttachment()


if __name__ == "__main__":
    BrokerClient.attach = attach  # type: ignore[method-assign]
    broker.main()
