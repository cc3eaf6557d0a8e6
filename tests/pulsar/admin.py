"""Calls of a broker's admin URL that tests make."""

import json
import urllib.request
from typing import Any

from pulsar_broker.standalone import Broker
from seqdedupe.testing import LAST_RESORT_SECONDS

TIMEOUT_SECONDS = LAST_RESORT_SECONDS


def call(
    broker: Broker,
    method: str,
    path: str,
    *,
    version: str = "v2",
    body: bytes | None = None,
    content_type: str = "application/json",
) -> Any:
    """The answer to `/admin/<version>/<path>`, from JSON; None if it is empty. Raises OSError."""
    request = urllib.request.Request(
        f"{broker.admin_url}/admin/{version}/{path}", data=body, method=method, headers={"Content-Type": content_type}
    )
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=TIMEOUT_SECONDS) as answer:
        return json.loads(answer.read() or b"null")
