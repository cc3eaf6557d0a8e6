"""A sidecar that believes who a caller says it is, in the metadata `name`; `operator` is the operator.

On SIGUSR1 it reads its rules again.
"""

import asyncio
import json
import signal
import sys
from typing import Any

import grpc

from broker_sidecar import kernels
from broker_sidecar.__main__ import main
from seqdedupe.errors import SeqdedupeError, error

MODULE = __name__ if __name__ != "__main__" else "tests.broker_sidecar.security.by_name"


def call_as(address: str, name: str) -> grpc.Channel:
    """A channel, over a connection of its own, to such a sidecar; its caller has this name, or none."""
    channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
    return grpc.intercept_channel(channel, _Named(name)) if name else channel


class _Named(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamUnaryClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Says the name in every call."""

    def __init__(self, name: str) -> None:
        self._metadata = (("name", name),)

    def _call(self, go_on: Any, details: Any, request: Any) -> Any:
        return go_on(details._replace(metadata=(*(details.metadata or ()), *self._metadata)), request)

    intercept_unary_unary = intercept_unary_stream = intercept_stream_unary = intercept_stream_stream = _call


def _serve() -> int:
    # Here, once it is known where kernels are kept: these have some.
    from broker_sidecar import server
    from broker_sidecar.security.gate import Gate
    from broker_sidecar.security.subject import OPERATOR, Subject

    def believe(self: Gate, method: str, request: Any, context: Any) -> Subject:
        name = dict(context.invocation_metadata()).get("name")
        if name is None:
            raise error("UNAUTHENTICATED", "no name is said")
        return Subject(name, "token" if name == OPERATOR else "jwt", None, context.peer())

    def reload(sidecar: server.Sidecar) -> None:
        try:
            sidecar.reload_rules()
            said = ""
        except SeqdedupeError as e:
            said = str(e)
        print(json.dumps({"event": "rules", "said": said}), file=sys.stderr)

    async def recover_and_listen(self: server.Sidecar) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, reload, self)
        await recover(self)

    recover, server.Sidecar.recover = server.Sidecar.recover, recover_and_listen  # type: ignore[method-assign]
    Gate._subject = believe  # type: ignore[method-assign]
    return main()


if __name__ == "__main__":
    kernels.prepare()
    sys.exit(_serve())
