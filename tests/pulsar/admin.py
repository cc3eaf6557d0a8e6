"""Calls of a broker's admin URL that tests make."""

import json
import urllib.request
from typing import Any

from pulsar_broker.standalone import Broker

TIMEOUT_SECONDS = 60.0


def call(broker: Broker, method: str, path: str, *, body: str | None = None) -> Any:
    """The answer to `/admin/v2/…`, as JSON; None if it is empty. Raises OSError."""
    request = urllib.request.Request(
        f"{broker.admin_url}/admin/v2/{path}",
        data=None if body is None else body.encode(),
        method=method,
        headers={"Content-Type": "application/json"},
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=TIMEOUT_SECONDS) as answer:
        return json.loads(answer.read() or b"null")
