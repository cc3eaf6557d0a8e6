"""Where a sidecar is: a host and port, or a Unix socket."""

from dataclasses import dataclass
from ipaddress import ip_address
from typing import Self

from seqdedupe.errors import SeqdedupeError, error

DEFAULT_ADDRESS = "127.0.0.1:6660"
"""Of a sidecar, for whoever names none."""

MAX_PORT = 65_535
_UNIX = "unix:"


@dataclass(frozen=True, slots=True)
class SidecarAddress:
    """A sidecar's address. `str()` gives back what `parse` takes: `host:port` (IPv6 in brackets) or `unix:/path`.

    Two are equal if they are the same text, the case of a host aside: no name is looked up."""

    host: str = ""
    port: int = 0
    """0, for a sidecar that is to listen: any free one."""

    path: str = ""
    """Of the Unix socket; host and port are empty then."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads an address. Raises INVALID_ADDRESS."""
        if text.startswith(_UNIX):
            path = text.removeprefix(_UNIX)
            if not path.strip("/"):
                raise _invalid(text)
            # `unix:///path` is how gRPC writes an absolute path as well.
            return cls(path=path.removeprefix("//") if path.startswith("///") else path)
        host, colon, port = text.rpartition(":")
        is_bracketed = host.startswith("[") and host.endswith("]")
        if not colon or not host or (":" in host or "/" in host) > is_bracketed:
            raise _invalid(text)
        if not (port.isascii() and port.isdecimal()) or int(port) > MAX_PORT:
            raise _invalid(text)
        return cls(host.lower(), int(port))

    def __str__(self) -> str:
        return f"{_UNIX}{self.path}" if self.path else f"{self.host}:{self.port}"

    @property
    def is_local(self) -> bool:
        """Whether nobody on another machine can reach it: a Unix socket, or loopback."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


def _invalid(text: str) -> SeqdedupeError:
    return error("INVALID_ADDRESS", f"{text!r} is not a sidecar's address: it should be host:port or unix:/path")
