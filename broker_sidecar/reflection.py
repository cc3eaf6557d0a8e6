"""grpc.reflection.v1alpha: tools learn the schema from the sidecar. Its streams count like all others."""

from collections.abc import Sequence
from typing import Any

import grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from broker_sidecar.rpc import Context, parse_small
from broker_sidecar.streams import Stream, Streams, messages

SERVICE: str = reflection.SERVICE_NAME


class Reflection:
    """The handler of grpc.reflection.v1alpha.ServerReflection."""

    def __init__(self, services: Sequence[str], streams: Streams) -> None:
        self._streams = streams
        self._answers = reflection.aio.ReflectionServicer(services)

    def handlers(self) -> grpc.GenericRpcHandler:
        methods: dict[str, Any] = {
            "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(self._streams.handler(self._serve))
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    async def _serve(self, _requests: object, context: Context, stream: Stream) -> None:
        async def requests() -> Any:
            async for data in messages(stream):
                yield parse_small(reflection_pb2.ServerReflectionRequest, data)

        answers: Any = self._answers.ServerReflectionInfo(requests(), context)
        async for answer in answers:
            await stream.write(answer.SerializeToString())
