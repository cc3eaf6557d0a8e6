"""Spans of calls, as a collector gets them from a real sidecar by OTLP. Costs four sidecars."""

import gzip
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from broker_sidecar.telemetry import ENDPOINT_VARIABLES, Traces
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2, publish_pb2
from tests.broker_sidecar.calls import NOT_DUP, Client, batch, verdicts

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
SAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-01"),)
LEFT_OUT = (("traceparent", f"00-{TRACE}-{PARENT}-00"),)
BROKEN = (("traceparent", "00-what-is-this-01"), ("tracestate", "x" * 1000))


class Collector:
    """What was sent to it."""

    def __init__(self, address: str) -> None:
        self.environment = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://{address}",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }
        self.resources: list[Any] = []
        self.spans: list[Any] = []

    def take(self, data: bytes) -> None:
        for sent in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.resources.append(sent.resource)
            self.spans += [span for scope in sent.scope_spans for span in scope.spans]

    def attributes(self, name: str) -> list[dict[str, Any]]:
        return [
            {one.key: one.value.string_value or one.value.int_value for one in span.attributes}
            for span in self.spans
            if span.name == name
        ]


@contextmanager
def collecting() -> Iterator[Collector]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            collector.take(gzip.decompress(data) if self.headers.get("Content-Encoding") == "gzip" else data)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        collector = Collector(f"127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()


def test_a_call_with_a_context_has_a_span_below_its_client_s(tmp_path: Path) -> None:
    with collecting() as collector, Sidecar(tmp_path, environment=collector.environment) as sidecar:
        client = Client(sidecar.address)
        opened = client.publish.Open(publish_pb2.OpenRequest(topic="t", producer_names=["p"]), metadata=SAMPLED)
        for metadata in ((), LEFT_OUT, BROKEN):
            client.admin.GetTopic(admin_pb2.GetTopicRequest(topic="t"), metadata=metadata)
        with pytest.raises(grpc.RpcError):
            client.admin.GetTopic(admin_pb2.GetTopicRequest(topic="none"), metadata=SAMPLED)
        # What has no context is served all the same.
        epochs = {"p": opened.epochs[0]}
        assert verdicts(client.publish_unary("t", batch([("p", 0)], epochs)), 1) == [NOT_DUP]
        client.close()
        assert sidecar.stop() == 0
        # The last ones were sent at its end.
        assert sorted(span.name for span in collector.spans) == [
            "seqdedupe.v1.AdminService/GetTopic",
            "seqdedupe.v1.PublishService/Open",
        ]
    for span in collector.spans:
        assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
        assert span.end_time_unix_nano >= span.start_time_unix_nano
    call = {"rpc.system": "grpc", "rpc.service": "seqdedupe.v1.PublishService", "rpc.method": "Open"}
    assert collector.attributes("seqdedupe.v1.PublishService/Open") == [call | {"rpc.grpc.status_code": 0}]
    (refused,) = collector.attributes("seqdedupe.v1.AdminService/GetTopic")
    assert refused["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    names = {one.value.string_value for resource in collector.resources for one in resource.attributes}
    assert "seqdedupe" in names


def test_who_may_not_call_is_not_traced(tmp_path: Path) -> None:
    with (
        collecting() as collector,
        Sidecar(tmp_path, environment=collector.environment, authentication="token") as sidecar,
    ):
        client = Client(sidecar.address)
        with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
            client.admin.GetTopic(admin_pb2.GetTopicRequest(topic="t"), metadata=SAMPLED)
        token = (*SAMPLED, ("authorization", f"Bearer {(sidecar.data / 'token').read_text().strip()}"))
        client.admin.ListTopics(admin_pb2.ListTopicsRequest(), metadata=token)
        client.close()
        assert sidecar.stop() == 0
    assert [span.name for span in collector.spans] == ["seqdedupe.v1.AdminService/ListTopics"]


def test_a_collector_that_answers_nothing_holds_up_no_stop(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        collector = Collector(f"127.0.0.1:{silent.getsockname()[1]}")
        # Far longer than a stop may take.
        patience = {"OTEL_EXPORTER_OTLP_TIMEOUT": "600"}
        with Sidecar(tmp_path, environment=collector.environment | patience) as sidecar:
            client = Client(sidecar.address)
            client.admin.ListTopics(admin_pb2.ListTopicsRequest(), metadata=SAMPLED)
            client.close()
            assert sidecar.stop() == 0


def test_without_an_endpoint_nothing_is_traced_nor_imported(tmp_path: Path) -> None:
    with Sidecar(tmp_path) as sidecar:
        client = Client(sidecar.address)
        client.admin.ListTopics(admin_pb2.ListTopicsRequest(), metadata=SAMPLED)
        client.close()
    handler: Any = object()
    assert Traces(dict.fromkeys(ENDPOINT_VARIABLES, "")).traced(handler) is handler


def test_without_the_extra_it_is_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    handler: Any = object()
    assert Traces({ENDPOINT_VARIABLES[0]: "http://127.0.0.1:1"}).traced(handler) is handler
    assert "seqdedupe[tracing]" in caplog.text
