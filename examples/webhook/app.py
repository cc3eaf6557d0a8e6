"""Webhooks into a topic of deduplication IDs: 200 only for what is durable, and the same answer to each copy.

$ SEQDEDUPE_ADDRESS=127.0.0.1:6660 WEBHOOK_TOPIC=webhooks uvicorn --workers 4 examples.webhook.app:app
"""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from seqdedupe.client import Client
from seqdedupe.errors import SeqdedupeError

ADDRESS = os.environ.get("SEQDEDUPE_ADDRESS", "127.0.0.1:6660")
TOPIC = os.environ.get("WEBHOOK_TOPIC", "webhooks")
ID_HEADER = "webhook-id"
"""The same in every delivery of an event."""
MAX_BODY_BYTES = 1024 * 1024
MAX_WAITING = 1024
"""So many requests wait for the sidecar in one worker; more are sent away."""
WAIT_SECONDS = 10.0
"""Less than senders wait for an answer."""
RETRY_AFTER_SECONDS = 2
NEVER = ("INVALID_DEDUPLICATION_ID", "MESSAGE_TOO_LARGE", "BATCH_TOO_LARGE")
"""Why an event is refused whenever it comes. All else may be mended, and senders give up what is answered with 400."""


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with Client(ADDRESS) as client, client.publisher(TOPIC) as publisher:
        # A worker does not start without its topic: a publisher that was told so takes nothing any more.
        await client.admin.topic(TOPIC)
        app.state.publisher, app.state.waiting = publisher, 0
        yield


async def receive(request: Request) -> Response:
    """Stores the body under the event's ID. Whoever gets no answer, or 503, sends it again, to whichever worker."""
    state = request.app.state
    if not (event_id := request.headers.get(ID_HEADER)):
        return JSONResponse({"error": f"there is no {ID_HEADER}"}, 400)
    if state.waiting >= MAX_WAITING:
        return _later("too many requests wait")
    state.waiting += 1
    try:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_BODY_BYTES:
                return JSONResponse({"error": f"more than {MAX_BODY_BYTES} bytes"}, 413)
        async with asyncio.timeout(WAIT_SECONDS):
            published = await state.publisher.send(body, deduplication_id=event_id.encode("latin-1"))
    except TimeoutError:
        # It may be stored, or will be: then the next delivery is its copy.
        return _later("the sidecar has not answered yet")
    except SeqdedupeError as e:
        return JSONResponse({"error": e.message}, 400) if e.reason in NEVER else _later(e.message)
    finally:
        state.waiting -= 1
    # Not whether it was new: a copy gets the answer of its original. One that was imported has none of both.
    return JSONResponse({"index": published.index, "message_id": str(published.message_id or "")})


def _later(why: str) -> Response:
    return JSONResponse({"error": why}, 503, headers={"retry-after": str(RETRY_AFTER_SECONDS)})


app = Starlette(routes=[Route("/", receive, methods=["POST"])], lifespan=lifespan)
