"""A call to which messages are sent ends for its caller with the status that the other side sent."""

from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from seqdedupe.address import SidecarAddress
from seqdedupe.client.connection import new_channel
from tests.client.foreign import answering

CALLS = 100


@pytest.mark.parametrize("is_ours", [True, False], ids=["as it is", "control: a channel of gRPC's"])
async def test_who_writes_learns_how_the_call_ended(tmp_path: Path, is_ours: bool) -> None:
    """The other side ends it at once, and reads nothing."""
    address = f"unix:{tmp_path}/socket"
    told: Counter[grpc.StatusCode] = Counter()
    async with answering(address, grpc.StatusCode.FAILED_PRECONDITION):
        channel = new_channel(SidecarAddress.parse(address)) if is_ours else grpc.aio.insecure_channel(address)
        async with channel:
            for _ in range(CALLS):
                call: Any = channel.stream_stream("/service/Method")()
                try:
                    while not call.done():
                        await call.write(b"x")
                    await call.read()
                except grpc.aio.AioRpcError as e:
                    told[e.code()] += 1
    assert (told == {grpc.StatusCode.FAILED_PRECONDITION: CALLS}) is is_ours, told
