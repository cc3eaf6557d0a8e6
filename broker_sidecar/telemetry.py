"""The messages of a running sidecar about itself: structured logs on standard error, traces, and its last warnings.

`configure` sends all log records to standard error. `Traces` has OpenTelemetry's spans. `LastWarnings` keeps the
warnings that `GetStatistics` shows.
"""

import asyncio
import json
import logging
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from broker_sidecar.rpc import Context, Handle, Wrapping, known_code
from seqdedupe.v1 import admin_pb2

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


LINES = 20
WINDOW_SECONDS = 10.0
"""At most this number of lines of a kind are written in this time."""

MAX_KINDS = 1_000
"""The most kinds that are distinguished at once. There are fewer, unless text from elsewhere is among them."""

_Kind = tuple[str, int, str]
_OTHERS: _Kind = ("", 0, "")


MAX_TEXT_CHARACTERS = 4_000
"""The most characters of each text in a line. It may contain text from a client."""

MAX_EXCEPTION_CHARACTERS = 20_000
"""The most characters of an exception with its traceback. Its own text, which comes last, may be long."""


def _cut(value: object, most: int = MAX_TEXT_CHARACTERS) -> object:
    """Return the value, or the beginning and the end of a longer text."""
    if not isinstance(value, str) or len(value) <= most:
        return value
    return f"{value[: most // 2]} [{len(value) - most} characters are omitted] {value[-(most // 2) :]}"


def _extra(record: logging.LogRecord) -> dict[str, object]:
    """Return the values that were logged as `extra`."""
    return {key: _cut(value) for key, value in vars(record).items() if key not in _OF_EVERY_RECORD}


_GRPC = "grpc"


def _is_of_grpc(record: logging.LogRecord) -> bool:
    return record.name.partition(".")[0] == _GRPC


class WithoutValues(logging.Filter):
    """A filter that reduces gRPC's own log records to place and kind, without values. Otherwise they would contain data
    of calls, such as a token followed by a byte that is not UTF-8."""

    def filter(self, record: logging.LogRecord) -> bool:
        if _is_of_grpc(record) and not hasattr(record, "left_out"):
            kind, _, trace = record.exc_info or (None, None, None)
            what = kind.__name__ if kind is not None else "a problem"
            while trace is not None and trace.tb_next is not None:
                trace = trace.tb_next
            where = f"{trace.tb_frame.f_code.co_filename}:{trace.tb_lineno}" if trace is not None else record.funcName
            record.msg, record.args = "gRPC reports %s at %s", (what, where)
            record.exc_info = record.exc_text = record.stack_info = None
        return True


class _Text(logging.Formatter):
    """A line for a person, followed by the values logged as `extra`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the library's name)
        record.message = str(_cut(record.message))
        return " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in _extra(record).items())])

    def formatException(self, ei: Any) -> str:  # noqa: N802 (the library's name)
        return str(_cut(super().formatException(ei), MAX_EXCEPTION_CHARACTERS))


class _Json(logging.Formatter):
    """`event`, `level`, `logger`, `timestamp`, and the values logged as `extra`."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "timestamp": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": _cut(record.getMessage()),
        }
        entry |= _extra(record)
        if record.exc_info:
            entry["exception"] = _cut(self.formatException(record.exc_info), MAX_EXCEPTION_CHARACTERS)
        return json.dumps(entry, default=str, ensure_ascii=False)


@dataclass(slots=True)
class _Window:
    """The lines of a kind since the window began."""

    ends: float
    lines: int = 0
    left_out: int = 0


def _later(seconds: float, tell: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()


class Limit(logging.Filter):
    """A filter that passes LINES of a kind in WINDOW_SECONDS, then one line with the number omitted (`left_out`).

    A message that a client or a failing disk can cause a thousand times says nothing new, and fills the disk. Lines are
    of one kind if they come from the same place with the same level. Their values do not matter.
    """

    def __init__(
        self,
        now_seconds: Callable[[], float] = time.monotonic,
        later: Callable[[float, Callable[[], None]], None] = _later,
    ) -> None:
        super().__init__()
        self._now_seconds = now_seconds
        self._later = later
        self._lock = threading.Lock()
        self._windows: dict[_Kind, _Window] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if hasattr(record, "left_out"):
            return True
        kind = record.name, record.levelno, str(record.msg)
        now = self._now_seconds()
        with self._lock:
            window = self._window(kind, now)
            window.lines += 1
            if window.lines <= LINES:
                return True
            window.left_out += 1
            is_first = window.left_out == 1
        if is_first:
            self._later(window.ends - now, lambda: _tell(kind, window))
        return False

    def _window(self, kind: _Kind, now: float) -> _Window:
        if kind not in self._windows and len(self._windows) >= MAX_KINDS:
            self._windows = {other: left for other, left in self._windows.items() if now < left.ends}
            if len(self._windows) >= MAX_KINDS:
                kind = _OTHERS
        window = self._windows.get(kind)
        if window is None or now >= window.ends:
            self._windows[kind] = window = _Window(now + WINDOW_SECONDS)
        return window


def _tell(kind: _Kind, window: _Window) -> None:
    name, level, message = kind
    told = "%d lines like this one were omitted: %s"
    logging.getLogger(name).log(level, told, window.left_out, message, extra={"left_out": window.left_out})


def configure(level: str, form: str) -> None:
    """Send all log records from this level on to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    text = _Text("%(asctime)s %(levelname)-7s %(name)s: %(message)s")
    handler.setFormatter(_Json() if form == "json" else text)
    handler.addFilter(WithoutValues())
    handler.addFilter(Limit())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    logging.getLogger("grpc._cython.cygrpc").addFilter(_concerns_somebody)


def _concerns_somebody(record: logging.LogRecord) -> bool:
    """Return False for gRPC's own line that it could not send, because the call was over.

    The client or its connection had gone when gRPC wrote a handler's answer, and gRPC had not noticed that yet."""
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


# -- OpenTelemetry traces: a span for each call whose client sends a context (W3C's `traceparent`).
#
# OpenTelemetry's own variables say where spans go. Without one of `ENDPOINT_VARIABLES` nothing is traced or imported.
# Needs the extra `seqdedupe[tracing]`.

logger = logging.getLogger("seqdedupe.traces")

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

CLOSE_SECONDS = 2.0
"""The longest wait of a stop for the last spans to be sent. A collector that is gone does not delay the stop longer."""

_CONTEXT = ("traceparent", "tracestate")
_NAME = "seqdedupe"

_FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
"""Codes that are the server's fault, by OpenTelemetry's semantic conventions for gRPC. The others are the caller's."""


class Traces:
    """Whether calls are traced, and the destination of their spans."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._provider: TracerProvider | None = None
        if any(environment.get(name) for name in ENDPOINT_VARIABLES):
            self._provider = _provider(environment)

    def traced(self, handler: grpc.GenericRpcHandler) -> grpc.GenericRpcHandler:
        """Return the service as this handler serves it, with tracing."""
        return handler if self._provider is None else _Traced(handler, self._provider)

    async def close(self) -> None:
        """Send the waiting spans, if the collector takes them soon."""
        if self._provider is not None:
            # Use a separate thread, because a silent collector would block it for long, and wait for it only this long.
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
        logger.warning("an OTLP endpoint is set, but calls are not traced: install seqdedupe[tracing]")
        return None
    named = Resource.create({} if environment.get("OTEL_SERVICE_NAME") else {"service.name": _NAME})
    provider = TracerProvider(resource=named, shutdown_on_exit=False)
    # Its queue is bounded: spans that the collector does not take are dropped.
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


# -- The last warnings of the process, for people who look at it.

KEPT = 50

MAX_MESSAGE_CHARACTERS = 2_000
"""The characters that are kept from the beginning of a longer message."""

_Place = tuple[str, int]
"""A line of a source file that logs."""


class LastWarnings(logging.Handler):
    """The newest KEPT records of level WARNING and above, from any thread.

    Repeated records of one place make room for the others, since a client may cause them. gRPC's own records are about
    data that its callers send, and are not kept.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: deque[tuple[_Place, admin_pb2.Warning]] = deque()

    def emit(self, record: logging.LogRecord) -> None:
        if _is_of_grpc(record):
            return
        try:
            message = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                message += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        except Exception:  # noqa: BLE001 (as every handler of the library: a record that cannot be told harms nobody)
            self.handleError(record)
            return
        warning = admin_pb2.Warning(
            time_ms=int(record.created * 1000),
            level=record.levelname,
            message=message[:MAX_MESSAGE_CHARACTERS].encode(errors="replace").decode(),
        )
        self._kept.append(((record.pathname, record.lineno), warning))
        if len(self._kept) > KEPT:
            # Among places with equal counts, take the one whose oldest record is older.
            [(most, _)] = Counter(place for place, _ in self._kept).most_common(1)
            del self._kept[next(k for k, (place, _) in enumerate(self._kept) if place == most)]

    def newest_first(self) -> list[admin_pb2.Warning]:
        # Other threads may log meanwhile. The copy is one atomic step.
        return [warning for _, warning in reversed(list(self._kept))]
