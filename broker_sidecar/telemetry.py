"""Output of a running sidecar about its own work: structured logs on standard error, traces, the last warnings, and
notices to the process that started it.

`configure` sends all log records to standard error. `Traces` creates OpenTelemetry spans. `LastWarnings` keeps the
warnings that `GetStatistics` returns. `Manager` reports to a service manager such as systemd. `Watchdog` ends a process
whose event loop is stuck.
"""

import asyncio
import faulthandler
import json
import logging
import os
import signal
import socket
import struct
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
"""In WINDOW_SECONDS, at most LINES lines of one kind are written."""

MAX_KINDS = 1_000
"""The most kinds of lines that are distinguished at once. There are more kinds only if messages contain varying text
from outside."""

_Kind = tuple[str, int, str]
_OTHERS: _Kind = ("", 0, "")


MAX_TEXT_CHARACTERS = 4_000
"""The most characters of each text in a line. The limit exists because a text may come from a client."""

MAX_EXCEPTION_CHARACTERS = 20_000
"""The most characters of an exception with its traceback. The exception's message, which comes last, may be long."""


def _cut(value: object, most: int = MAX_TEXT_CHARACTERS) -> object:
    """Return the value. If it is a text that is too long, return the beginning and the end."""
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
    """A filter that reduces gRPC's log records to the place and kind of the problem. Without the filter, the records
    would contain data of calls, such as a token followed by a byte that is not UTF-8."""

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
    """Formats a record as a line for a person, followed by the values logged as `extra`."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 (the library's name)
        record.message = str(_cut(record.message))
        return " ".join([super().formatMessage(record), *(f"{k}={v}" for k, v in _extra(record).items())])

    def formatException(self, ei: Any) -> str:  # noqa: N802 (the library's name)
        return str(_cut(super().formatException(ei), MAX_EXCEPTION_CHARACTERS))


class _Json(logging.Formatter):
    """Formats a record as JSON, with `event`, `level`, `logger`, `timestamp`, and the values logged as `extra`."""

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
    """The number of lines of one kind since the window began, and the number omitted (`left_out`)."""

    ends: float
    lines: int = 0
    left_out: int = 0


def _later(seconds: float, tell: Callable[[], None]) -> None:
    timer = threading.Timer(seconds, tell)
    timer.daemon = True
    timer.start()


class Limit(logging.Filter):
    """A filter that passes LINES lines of one kind in WINDOW_SECONDS. If more lines were omitted, one line with their
    number (`left_out`) follows at the end of the window.

    Without the filter, a client or a failing disk could fill the disk with a message that is repeated a thousand times.
    Lines are of one kind if they have the same logger, level and message template. Their values do not matter.
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
    """Send all log records of at least this level to standard error."""
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
    """Return False for the log record in which gRPC reports that it could not send data because the call was over.

    gRPC logs this record if the client disconnects just before gRPC writes a handler's answer.
    """
    return not (record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError))


# -- OpenTelemetry traces. Each call whose client sends a trace context (W3C's `traceparent`) has a span.
#
# OpenTelemetry's environment variables set the destination of the spans. Without one of `ENDPOINT_VARIABLES`, nothing
# is traced, and the OpenTelemetry packages are not imported. Tracing needs the extra `seqdedupe[tracing]`.

_traces_logger = logging.getLogger("seqdedupe.traces")

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

CLOSE_SECONDS = 2.0
"""When the sidecar stops, the longest wait until the last spans are sent. So an unreachable collector does not delay
the stop for longer."""

_CONTEXT = ("traceparent", "tracestate")
_NAME = "seqdedupe"

_FAULTS = ("UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS")
"""The status codes that are the server's fault according to OpenTelemetry's semantic conventions for gRPC. All other
codes are the caller's fault."""


class Traces:
    """Traces calls if the environment has an endpoint for spans."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._provider: TracerProvider | None = None
        if any(environment.get(name) for name in ENDPOINT_VARIABLES):
            self._provider = _provider(environment)

    def traced(self, handler: grpc.GenericRpcHandler) -> grpc.GenericRpcHandler:
        """Return a handler that serves the same service with tracing. If calls are not traced, return the handler
        unchanged."""
        return handler if self._provider is None else _Traced(handler, self._provider)

    async def close(self) -> None:
        """Send the waiting spans. Give up after CLOSE_SECONDS."""
        if self._provider is not None:
            # Shut down in a separate thread, because a collector that does not answer would block the shutdown for a
            # long time.
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
        _traces_logger.warning("an OTLP endpoint is set, but calls are not traced: install seqdedupe[tracing]")
        return None
    named = Resource.create({} if environment.get("OTEL_SERVICE_NAME") else {"service.name": _NAME})
    provider = TracerProvider(resource=named, shutdown_on_exit=False)
    # The processor's queue is bounded. Spans that the collector does not accept are dropped.
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


# -- The last warnings of the process, for people who inspect the sidecar.

KEPT = 50

MAX_MESSAGE_CHARACTERS = 2_000
"""The most characters of a message. The end of a longer message is dropped."""

_Place = tuple[str, int]
"""The path of a source file and the line number of a logging call."""


class LastWarnings(logging.Handler):
    """Keeps the newest KEPT records of level WARNING and above, from all threads.

    If there are too many records, the oldest record of the place in the code with the most records is dropped, because
    a client may cause repeated records. gRPC's own records are not kept, because they are about data that callers send.
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
            # Among places with equal counts, this chooses the place whose oldest record is older.
            [(most, _)] = Counter(place for place, _ in self._kept).most_common(1)
            del self._kept[next(k for k, (place, _) in enumerate(self._kept) if place == most)]

    def newest_first(self) -> list[admin_pb2.Warning]:
        # Other threads may log at the same time. `list` copies the records in one atomic step.
        return [warning for _, warning in reversed(list(self._kept))]


# -- Notices to the process that started this one, as in `sd_notify(3)`: that the sidecar serves, its progress, and that
# it stops; if a service manager wants it (`WatchdogSec`), also regularly that the event loop runs. NOTIFY_SOCKET in the
# environment is the address of the receiver; without it, or without a receiver there, nothing is reported. `Listener`
# receives the notices of workers for their parent.

_notices_logger = logging.getLogger("seqdedupe.notify")

BEAT_SECONDS = 5.0
"""The time after which a change of the status is reported. It is shorter if the manager's time limit is shorter."""
BEATS_WITHIN_PATIENCE = 4

SOCKET_VARIABLE = "NOTIFY_SOCKET"
PATIENCE_VARIABLE = "WATCHDOG_USEC"
"""The microseconds without a report after which a process counts as stuck."""
PROCESS_VARIABLE = "WATCHDOG_PID"

_MAX_NOTICE_BYTES = 4096
_CREDENTIALS = struct.Struct("3i")
"""Process, user and group of a sender, as reported by the kernel."""


def patience_seconds(environment: Mapping[str, str]) -> float | None:
    """Return the time without a report after which this process counts as stuck; None: never."""
    microseconds = environment.get(PATIENCE_VARIABLE, "")
    is_ours = environment.get(PROCESS_VARIABLE, str(os.getpid())) == str(os.getpid())
    return int(microseconds) / 1e6 if is_ours and microseconds.isdecimal() and int(microseconds) else None


class Manager:
    """The service manager that started this process, if it wants reports. Reporting never waits and never fails."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        where = environment.get(SOCKET_VARIABLE, "")
        # @ stands for the zero byte: a name that is in no file system.
        self._address = f"\0{where[1:]}" if where.startswith("@") else where
        self._patience_seconds = patience_seconds(environment)
        self._owed: dict[str, str] = {}

    @property
    def is_there(self) -> bool:
        """Whether there is a manager that wants reports."""
        return bool(self._address)

    def tell(self, **values: str) -> None:
        """Report these values. If the manager does not accept a report now, the values are sent with the next
        report."""
        if not self.is_there:
            return
        self._owed |= values
        lines = "\n".join(f"{name}={value}" for name, value in self._owed.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sending:
                sending.sendto(lines.encode(), self._address)
        except BlockingIOError:
            return
        except OSError as e:
            # The manager has gone, or never existed: the sidecar serves without it.
            _notices_logger.debug("the service manager cannot be notified: %s", e)
        self._owed.clear()

    async def keep_telling(self, status: Callable[[], str]) -> None:
        """Report that the event loop runs, and the status if it has changed, until cancelled."""
        beat_seconds = min(BEAT_SECONDS, (self._patience_seconds or BEAT_SECONDS) / BEATS_WITHIN_PATIENCE)
        told = ""
        while self.is_there:
            now = status()
            values = {} if now == told else {"STATUS": now}
            if self._patience_seconds is not None:
                values["WATCHDOG"] = "1"
            if values:
                self.tell(**values)
            told = now
            await asyncio.sleep(beat_seconds)


class Listener:
    """A receiver for the reports that child processes would send to a service manager.

    `on_told` is called with the process's number and the reported values. The kernel identifies the sender, so no other
    process can report in its name. The listener reads on the event loop on which it was created, until `close`.
    """

    def __init__(self, on_told: Callable[[int, dict[str, str]], None]) -> None:
        self._on_told = on_told
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        # The kernel chooses a free name.
        self._socket.bind("")
        self._name: bytes = self._socket.getsockname()
        asyncio.get_running_loop().add_reader(self._socket, self._read)

    def environment(self) -> dict[str, str]:
        """Return the environment of a process that is to report here."""
        return {SOCKET_VARIABLE: f"@{self._name[1:].decode()}"}

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._socket)
        self._socket.close()

    def _read(self) -> None:
        told, passed, _, _ = self._socket.recvmsg(_MAX_NOTICE_BYTES, socket.CMSG_SPACE(_CREDENTIALS.size))
        for level, kind, data in passed:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                lines = told.decode(errors="replace").splitlines()
                self._on_told(_CREDENTIALS.unpack(data)[0], dict(line.split("=", 1) for line in lines if "=" in line))


# -- A process whose event loop is stuck ends: it serves nobody, and a service manager can start it again.

STANDS_STILL_SECONDS = 30.0
"""The time that a broker waits for a ping, by default. No step of the event loop takes a second."""
LOOKS = 10
"""The number of consecutive looks that must find the event loop in the same place. If the whole process was stopped or
had no processor, the thread has not looked either, so the process is not ended."""
TELL_SECONDS = 2


class Watchdog:
    """A thread that watches the event loop on which it was created. If the loop is stuck, the thread calls `end`, which
    ends the process.

    The thread cannot detect a loop that is blocked by code that never releases the interpreter's lock.
    """

    def __init__(self, end: Callable[[str], None], limit_seconds: float = STANDS_STILL_SECONDS) -> None:
        self._end = end
        self._limit_seconds = limit_seconds
        self._loop = asyncio.get_running_loop()
        self._beats = 0
        self._beat()
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def _beat(self) -> None:
        self._beats += 1
        self._loop.call_later(self._limit_seconds / LOOKS / 2, self._beat)

    def _watch(self) -> None:
        seen = looks = 0
        while True:
            time.sleep(self._limit_seconds / LOOKS)
            seen, looks = (seen, looks + 1) if self._beats == seen else (self._beats, 0)
            if looks == LOOKS:
                # The report may block, because no process reads it. Then this alarm ends the process.
                signal.alarm(TELL_SECONDS)
                faulthandler.dump_traceback()
                self._end(f"its event loop has stood still for {self._limit_seconds:.0f} s")
