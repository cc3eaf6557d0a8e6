"""A client that knows nothing of a server but what reflection says, as grpcurl."""

from collections.abc import Iterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from google.protobuf.message import Message
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.broker_sidecar.calls import TIMEOUT_SECONDS


class Reflected:
    """What reflection says of a server, and calls made with nothing else."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        self.pool = descriptor_pool.DescriptorPool()
        self._files: set[str] = set()

    def ask(self, **request: Any) -> reflection_pb2.ServerReflectionResponse:
        answers: Iterator[reflection_pb2.ServerReflectionResponse]
        answers = self._stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(**request)]))
        [answer] = answers
        return answer

    def services(self) -> list[str]:
        return sorted(one.name for one in self.ask(list_services="").list_services_response.service)

    def service(self, name: str) -> Any:
        """The descriptor of a service, its files fetched one by one."""
        self._add(self.ask(file_containing_symbol=name))
        return self.pool.FindServiceByName(name)

    def _add(self, answer: reflection_pb2.ServerReflectionResponse) -> None:
        for data in answer.file_descriptor_response.file_descriptor_proto:
            file = descriptor_pb2.FileDescriptorProto.FromString(data)
            if file.name in self._files:
                continue
            self._files.add(file.name)
            for needed in file.dependency:
                self._add(self.ask(file_by_filename=needed))
            self.pool.Add(file)

    def call(self, method: Any, request: dict[str, Any]) -> dict[str, Any]:
        """A unary call from JSON to JSON."""
        kinds = [message_factory.GetMessageClass(kind) for kind in (method.input_type, method.output_type)]
        path = f"/{method.containing_service.full_name}/{method.name}"
        call: grpc.UnaryUnaryMultiCallable[bytes, Message]
        call = self._channel.unary_unary(path, response_deserializer=kinds[1].FromString)
        answer = call(json_format.ParseDict(request, kinds[0]()).SerializeToString(), timeout=TIMEOUT_SECONDS)
        return json_format.MessageToDict(answer)
