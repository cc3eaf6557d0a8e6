"""A sidecar that ends its newest server of gRPC at SIGUSR1, as gRPC itself does after a defect in it."""

import asyncio
import signal
import sys
from typing import Any

import grpc.aio

from broker_sidecar.__main__ import main

MODULE = "tests.broker_sidecar.ending_server"

_made = grpc.aio.server


def _server(**options: Any) -> grpc.aio.Server:
    server = _made(**options)
    end = server.stop
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, lambda: asyncio.ensure_future(end(None)))
    return server


if __name__ == "__main__":
    grpc.aio.server = _server  # type: ignore[assignment]
    sys.exit(main())
