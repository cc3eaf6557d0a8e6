"""A broker whose log is a Redis stream. It deduplicates by asking a sidecar.

    redis-server --appendonly yes --appendfsync always
    python -m examples.redis.broker                     # beside: seqdedupe serve --data-directory data --log broker

Producers talk to it as to `examples/broker`, whose half that is; here is what makes a stream a log that can be trusted.

A stream has an order and IDs, which are the positions. It has no predecessors: an entry that was deleted leaves no
trace, so every entry says which one was before it. It has no owner either: whoever comes adds entries, and a request
that was given up for lost may arrive later. So entries are added by a script, which Redis runs alone and as a whole:
it adds them only for the owner, and only after the entry that the owner believes to be the last. A request that comes
late, or twice (the client repeats them when a connection breaks), adds nothing.
"""

import argparse
import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import suppress
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from examples.broker.broker import Message, OutcomeUnknown, WriteRefused, options_of, serve_log
from seqdedupe.client import Entry, Range
from seqdedupe.errors import error

REPLAY_ENTRIES = 1000
"""In one answer of Redis."""

LAST = """
local function last(stream)
    if redis.call('EXISTS', stream) == 0 then return '' end
    local info = redis.call('XINFO', 'STREAM', stream)
    for i = 1, #info, 2 do
        -- It stays when the entry itself is deleted: the replay then lacks it.
        if info[i] == 'last-generated-id' then return info[i + 1] end
    end
end
"""

TAKE = f"""{LAST}
local owner = redis.call('GET', KEYS[2]) or ''
if string.sub(owner, 1, #ARGV[1]) ~= ARGV[1] then return redis.error_reply('FENCED another broker owns the stream') end
redis.call('SET', KEYS[2], ARGV[2])
return last(KEYS[1])
"""
"""Makes ARGV[2] the owner, if one whose name begins with ARGV[1] was; answers the last ID."""

APPEND = f"""{LAST}
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return redis.error_reply('FENCED another broker owns the stream') end
local previous = ARGV[2]
if last(KEYS[1]) ~= previous then return redis.error_reply('CHANGED the last entry is ' .. last(KEYS[1])) end
local ids = {{}}
for i = 3, #ARGV, 3 do
    previous = redis.call('XADD', KEYS[1], '*', 'previous', previous,
        'producer_name', ARGV[i], 'sequence_id', ARGV[i + 1], 'payload', ARGV[i + 2])
    ids[#ids + 1] = previous
end
return ids
"""
"""Adds messages for the owner ARGV[1] after the entry ARGV[2]; answers their IDs."""


class Fenced(Exception):
    """Another broker has taken the stream: this one is at its end."""


class RedisLog:
    """A stream, and beside it a key that names its owner."""

    def __init__(self, redis: Redis, stream: str) -> None:
        self._redis = redis
        self._keys = stream, f"{stream}:owner"
        self._process = secrets.token_hex(16)
        self._takes = 0
        self._has_taken = False
        self._last = b""

    async def check_durable(self) -> None:
        """What Redis has answered must be on its disk."""
        settings = {"appendonly": "yes", "appendfsync": "always"}
        for name, value in settings.items():
            if (await self._redis.config_get(name))[name] != value:
                raise error("INVALID_CONFIGURATION", f"redis-server needs --{name} {value}")

    async def take(self) -> bytes:
        # A new owner each time: what this process has under way adds nothing any more. Once taken, the stream is not
        # taken again from another process: two brokers would take it from one another for ever.
        self._takes += 1
        self._last = await self._run(TAKE, self._process if self._has_taken else "", self._owner)
        self._has_taken = True
        return self._last

    @property
    def _owner(self) -> str:
        return f"{self._process}:{self._takes}"

    async def after(self, position: bytes) -> AsyncIterator[Entry]:
        while True:
            first = f"({position.decode()}" if position else "-"
            entries = await self._asked(self._redis.xrange(self._keys[0], first, count=REPLAY_ENTRIES))
            for position, fields in entries:
                if b"previous" not in fields:
                    raise error("REPLAY_GAP", f"the entry {position.decode()} was added by another process")
                name, sequence_id = fields[b"producer_name"].decode(), int(fields[b"sequence_id"])
                yield Entry(Range(name, sequence_id), position, fields[b"previous"])
            if not entries:
                return

    async def append(self, messages: Sequence[Message]) -> list[bytes]:
        rows = [(one.range.producer_name, one.range.sequence_id, one.payload) for one in messages]
        ids: list[bytes] = await self._run(APPEND, self._owner, self._last, *(value for row in rows for value in row))
        self._last = ids[-1]
        return ids

    async def _run(self, script: str, *arguments: str | bytes | int) -> Any:
        return await self._asked(self._redis.eval(script, len(self._keys), *self._keys, *arguments))

    async def _asked(self, answer: Awaitable[Any]) -> Any:
        try:
            return await answer
        except (RedisConnectionError, RedisTimeoutError) as e:
            raise OutcomeUnknown(str(e)) from e
        except ResponseError as e:
            if str(e).startswith("FENCED"):
                raise Fenced(str(e)) from e
            if str(e).startswith("CHANGED"):
                # It was done already, or by somebody else: the replay tells.
                raise OutcomeUnknown(str(e)) from e
            raise WriteRefused(str(e)) from e


async def serve(options: argparse.Namespace) -> None:
    """Serves producers until it is stopped."""
    async with Redis.from_url(options.redis) as redis:
        log = RedisLog(redis, options.stream)
        await log.check_durable()
        await serve_log(log, options)


def main() -> None:
    parser = options_of("A broker whose log is a Redis stream, deduplicated by a sidecar.")
    parser.add_argument("--redis", default="redis://127.0.0.1:6379", metavar="URL", help="of the server")
    parser.add_argument("--stream", default="example", help="the stream's key")
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
