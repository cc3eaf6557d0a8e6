"""A sidecar that believes who a caller says it is, in the metadata `name`; `operator` is the operator.

On SIGUSR1 it reads its rules again.
"""

import asyncio
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

import grpc

from broker_sidecar import kernels
from broker_sidecar.__main__ import main
from seqdedupe.errors import error
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2_grpc, publish_pb2_grpc, read_pb2_grpc
from tests.broker_sidecar import with_constants
from tests.broker_sidecar.calls import TIMEOUT_SECONDS, Client

MODULE = __name__ if __name__ != "__main__" else "tests.broker_sidecar.security.by_name"


def call_as(address: str, name: str) -> grpc.Channel:
    """A channel, over its own connection, to such a sidecar; its caller has this name, or none."""
    channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
    return grpc.intercept_channel(channel, _Named(name)) if name else channel


class Caller(Client):
    """A client of such a sidecar, by name."""

    def __init__(self, address: str, name: str) -> None:
        super().__init__(address)
        self.channel.close()
        self.channel = call_as(address, name)
        self.publish = publish_pb2_grpc.PublishServiceStub(self.channel)
        self.reading = read_pb2_grpc.ReadServiceStub(self.channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(self.channel)


class Ruled(Sidecar):
    """Such a sidecar, with rules."""

    def __init__(self, folder: Path, rules: str, *, module: str = MODULE, **keys: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.rules = folder / "rules.toml"
        self.rules.write_text(rules)
        super().__init__(folder, module=module, rules_file=self.rules, authentication="token", **keys)

    def replace(self, rules: str) -> str:
        """Other rules are in force on return; says why not if they are not."""
        self.rules.write_text(rules)
        before = len(self._told())
        self.signal(signal.SIGUSR1)
        give_up_at = time.monotonic() + TIMEOUT_SECONDS
        while len(told := self._told()) == before:
            self.check_running()
            assert time.monotonic() < give_up_at
            time.sleep(0.01)
        return told[-1]

    def _told(self) -> list[str]:
        return [entry["said"] for entry in self.log if entry["event"] == "rules"]


class _Named(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Says the name in every call."""

    def __init__(self, name: str) -> None:
        self._metadata = (("name", name),)

    def _call(self, go_on: Any, details: Any, request: Any) -> Any:
        return go_on(details._replace(metadata=(*(details.metadata or ()), *self._metadata)), request)

    intercept_unary_unary: Any = _call
    intercept_unary_stream: Any = _call
    intercept_stream_unary: Any = _call
    intercept_stream_stream: Any = _call


def serve() -> int:
    """As the sidecar's."""
    # Here, once it is known where kernels are kept: these have some.
    from broker_sidecar.security.authentication import Authentication
    from broker_sidecar.security.subject import OPERATOR, Subject
    from broker_sidecar.server import SidecarServer as Served

    def believe(self: Authentication, context: Any) -> Subject:
        name = dict(context.invocation_metadata()).get("name")
        if name is None:
            raise error("UNAUTHENTICATED", "no name is said")
        return Subject(name, "token" if name == OPERATOR else "jwt", None, context.peer())

    def reload(sidecar: Served) -> None:
        sidecar.reload()
        said = str((sidecar._guard._rules and sidecar._guard._rules.problem) or "")
        print(json.dumps({"event": "rules", "said": said}), file=sys.stderr)

    async def recover_and_listen(self: Served) -> None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, reload, self)
        await recover(self)

    with_constants.replace()
    recover, Served.recover = Served.recover, recover_and_listen  # type: ignore[method-assign]
    Authentication.__call__ = believe  # type: ignore[method-assign]
    return main()


if __name__ == "__main__":
    kernels.prepare()
    sys.exit(serve())
