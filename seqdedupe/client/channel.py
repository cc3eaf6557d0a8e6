"""A channel whose calls say who makes them."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from seqdedupe.client.credentials import Credentials

AUTHORIZATION = "authorization"
"""The name of the metadata in which a token goes, as `Bearer TOKEN`."""


class AuthorizedChannel(grpc.aio.Channel):
    """A channel over which each call and stream carries the token as it is when that begins.

    gRPC's own call credentials take no connection without TLS, and its interceptors have every message of a stream pass
    them. Making a call raises CREDENTIALS_UNAVAILABLE, and what `check` raises, which is called just before.
    """

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials, check: Callable[[], None]) -> None:
        self._channel = channel
        self._credentials = credentials
        self._check = check

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_stream(*args, **options))

    def _with_token(self, make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, metadata: tuple[tuple[str, str], ...] = (), **options: Any) -> Any:
            shown = AUTHORIZATION, f"Bearer {self._credentials.token_now()}"
            self._check()
            return make(*args, metadata=(shown, *metadata), **options)

        return call

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()
