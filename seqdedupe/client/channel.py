"""A channel whose calls say who makes them, and whose callers learn how a call ended."""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import grpc
import grpc.aio

from seqdedupe.client.credentials import Credentials

AUTHORIZATION = "authorization"
"""The name of the metadata in which a token goes, as `Bearer TOKEN`."""


class Channel(grpc.aio.Channel):
    """A channel over which each call and stream carries the token as it is when that begins, if there is one.

    gRPC's own call credentials take no connection without TLS, and its interceptors have every message of a stream pass
    them. Making a call raises CREDENTIALS_UNAVAILABLE, and what `check` raises, which is called just before.
    """

    def __init__(self, channel: grpc.aio.Channel, credentials: Credentials, check: Callable[[], None]) -> None:
        self._channel = channel
        self._credentials = credentials
        self._check = check

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._calling(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._calling(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return _keeping_status(self._calling(self._channel.stream_unary(*args, **options)))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return _keeping_status(self._calling(self._channel.stream_stream(*args, **options)))

    def _calling(self, make: Callable[..., Any]) -> Callable[..., Any]:
        if not self._credentials.has_token:
            return make

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


def _keeping_status(make: Callable[..., Any]) -> Callable[..., Any]:
    """The same calls, whose status is always the one that the other side sent."""

    def call(*args: Any, **options: Any) -> Any:
        made = make(*args, **options)
        if hasattr(made, _INSIDE):
            setattr(made, _INSIDE, _StatusKept(getattr(made, _INSIDE)))
        return made

    return call


_INSIDE = "_cython_call"
"""Where grpcio has the inside of a call."""


class _StatusKept:
    """The inside of a call to which the caller sends messages.

    A write fails when the other side has ended the call. grpcio then replaces the status, whether it has come or is
    still to come, with "Internal error from Core", so that the caller never learns why. Without that it waits for the
    status.
    """

    def __init__(self, inside: Any) -> None:
        self._inside = inside

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    def set_internal_error(self, _text: str) -> None:
        pass
