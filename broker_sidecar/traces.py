"""OpenTelemetry traces: a span for each call whose client sends a context (W3C's `traceparent`).

Where spans go is said by OpenTelemetry's own variables; without one of `ENDPOINT_VARIABLES` nothing is traced, and
nothing imported. Needs the extra `seqdedupe[tracing]`.
"""

import asyncio
import logging
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import grpc

from broker_sidecar.rpc import Context, known_code
from broker_sidecar.wrapping import Handle, Wrapping

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger("seqdedupe.traces")

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

CLOSE_SECONDS = 2.0
"""So long the end waits until the last spans are sent; a collector that is gone holds up no stop."""

_CONTEXT = ("traceparent", "tracestate")
_NAME = "seqdedupe"

_FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
"""Codes that are the server's fault, by OpenTelemetry's semantic conventions for gRPC; others are the caller's."""


class Traces:
    """Whether calls are traced, and where their spans go."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._provider: TracerProvider | None = None
        if any(environment.get(name) for name in ENDPOINT_VARIABLES):
            self._provider = _provider(environment)

    def traced(self, handler: grpc.GenericRpcHandler) -> grpc.GenericRpcHandler:
        """The service as this handler serves it, traced."""
        return handler if self._provider is None else _Traced(handler, self._provider)

    async def close(self) -> None:
        """Sends the spans that wait, if the collector takes them soon."""
        if self._provider is not None:
            # A thread of its own, for which nobody waits longer: a collector that is silent would have it for long.
            closing = threading.Thread(target=self._provider.shutdown, daemon=True)
            closing.start()
            await asyncio.to_thread(closing.join, CLOSE_SECONDS)


def _provider(environment: Mapping[str, str]) -> "TracerProvider | None":
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        logger.warning("an OTLP endpoint is set, and calls are not traced: install seqdedupe[tracing]")
        return None
    named = Resource.create({} if environment.get("OTEL_SERVICE_NAME") else {"service.name": _NAME})
    provider = TracerProvider(resource=named, shutdown_on_exit=False)
    # Its queue is bounded: spans that a collector does not take are dropped.
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


class _Traced(Wrapping):
    def __init__(self, handler: grpc.GenericRpcHandler, provider: "TracerProvider") -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        super().__init__(handler)
        self._trace: Any = trace
        self._tracer = provider.get_tracer(_NAME)
        self._propagator = TraceContextTextMapPropagator()

    def wrap(self, method: str, handle: Handle, found: "grpc.RpcMethodHandler[Any, Any]") -> Handle:
        name = method.removeprefix("/")
        service, _, call = name.rpartition("/")
        attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": call}

        async def traced(request: Any, context: Context) -> Any:
            if not (sent := _sent(context.invocation_metadata() or ())):
                return await handle(request, context)
            parent = self._propagator.extract(sent)
            if not self._trace.get_current_span(parent).get_span_context().is_valid:
                return await handle(request, context)
            span = self._tracer.start_span(name, parent, self._trace.SpanKind.SERVER, attributes)
            code = None
            try:
                return await handle(request, context)
            except asyncio.CancelledError:
                code = grpc.StatusCode.CANCELLED
                raise
            finally:
                self._end(span, code or known_code(context.code()) or grpc.StatusCode.OK, context)

        return traced

    def _end(self, span: Any, code: grpc.StatusCode, context: Context) -> None:
        span.set_attribute("rpc.grpc.status_code", code.value[0])
        if code.name in _FAULTS:
            details: Any = context.details() or ""
            why = details.decode(errors="replace") if isinstance(details, bytes) else details
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, why))
        span.end()


def _sent(metadata: Iterable[tuple[str, str | bytes]]) -> dict[str, str]:
    return {name: value for name, value in metadata if name in _CONTEXT and isinstance(value, str)}
