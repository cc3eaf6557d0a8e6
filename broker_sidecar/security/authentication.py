"""Who makes a call, by what it shows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker_sidecar.config import Config
from broker_sidecar.rpc import Context
from broker_sidecar.security import own_token
from broker_sidecar.security.gate import anybody
from broker_sidecar.security.own_token import OwnToken
from broker_sidecar.security.subject import OPERATOR, Subject
from broker_sidecar.security.watching import Watched
from broker_sidecar.streams import Streams
from seqdedupe.errors import SeqdedupeError, error

AUTHORIZATION = "authorization"
_SCHEME = "bearer"


class Authentication:
    """Who makes each call, as the configuration has it. When what somebody has shown is not valid any more, their
    streams end, with TOKEN_EXPIRED, so that they show what is."""

    def __init__(self, config: Config, streams: Streams) -> None:
        """Makes the data directory's token if there is none. Raises INVALID_CONFIGURATION; OSError."""
        self.watched: list[Watched[Any]] = []
        """The files that this takes."""
        self._streams = streams
        self._token: OwnToken | None = None
        if config.authentication == "token":
            self._token = OwnToken(own_token.make(Path(config.data_directory)), self._end("token"))
            self.watched.append(self._token.watched)

    def __call__(self, context: Context) -> Subject:
        """Raises UNAUTHENTICATED, TOKEN_EXPIRED."""
        if self._token is None:
            return anybody(context)
        if (token := _token_in(context)) is None:
            raise error("UNAUTHENTICATED", "the call shows no token")
        if self._token.is_shown(token):
            return Subject(OPERATOR, "token", None, context.peer())
        raise error("UNAUTHENTICATED", "the token is not this sidecar's")

    def _end(self, kind: str) -> Callable[[], None]:
        """Ends the streams of those who are known by this."""

        def why(subject: Subject) -> SeqdedupeError | None:
            return error("TOKEN_EXPIRED", "the sidecar takes other tokens now") if subject.kind == kind else None

        return lambda: self._streams.end_where(why)


def _token_in(context: Context) -> bytes | None:
    """The token that a call shows; None if it shows none. Raises UNAUTHENTICATED."""
    shown = [value for name, value in context.invocation_metadata() or () if name == AUTHORIZATION]
    if not shown:
        return None
    scheme, _, token = str(shown[0]).partition(" ")
    if len(shown) > 1 or scheme.lower() != _SCHEME:
        raise error("UNAUTHENTICATED", f"the call's metadata {AUTHORIZATION} is not one token, as `Bearer TOKEN`")
    return token.strip().encode()
