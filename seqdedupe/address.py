"""The address of a sidecar (a host and port, or a Unix socket), and the reason why nothing can listen at an address."""

import errno
import socket
from ipaddress import ip_address
from pathlib import Path
from typing import NamedTuple, Self

from seqdedupe.errors import SeqdedupeError, error

DEFAULT_ADDRESS = "127.0.0.1:6660"
"""The sidecar's address for callers that give none."""

MAX_PORT = 65_535
_UNIX = "unix:"


class SidecarAddress(NamedTuple):
    """A sidecar's address. `str()` returns the form that `parse` accepts: `host:port` (IPv6 in brackets) or
    `unix:/path`. Two addresses are equal if their texts are equal, without regard to the case of a host. Host names are
    not resolved."""

    host: str = ""
    port: int = 0
    """0, for a sidecar that will listen: any free port."""

    path: str = ""
    """The path of the Unix socket; host and port are then empty."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the address in this text. Raises INVALID_ADDRESS."""
        if text.startswith(_UNIX):
            path = text.removeprefix(_UNIX)
            if not path.strip("/"):
                raise _invalid(text)
            # gRPC also writes an absolute path as `unix:///path`.
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
        """Return whether only this machine can reach the address: the address is a Unix socket or loopback."""
        if self.path or self.host == "localhost":
            return True
        try:
            return ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False

    @property
    def is_everywhere(self) -> bool:
        """Return whether the host stands for all addresses of a machine, in any spelling: `0.0.0.0`, `0`, `[::0]`,
        `*`. A server can listen there, but no client can connect to it."""
        host = self.host.strip("[]").partition("%")[0]
        if self.path or host in ("", "*"):
            return not self.path
        try:
            # Only the resolver knows all spellings of a number. With this flag it looks nothing up.
            [found, *_] = socket.getaddrinfo(host, None, flags=socket.AI_NUMERICHOST)
        except (OSError, UnicodeError):
            return False
        address = ip_address(found[4][0])
        return (getattr(address, "ipv4_mapped", None) or address).is_unspecified


def _invalid(text: str) -> SeqdedupeError:
    return error("INVALID_ADDRESS", f"{text!r} is not a sidecar's address: it should be host:port or unix:/path")


def cannot_listen(address: SidecarAddress, e: Exception, key: str = "listen") -> SeqdedupeError:
    """Return the CANNOT_LISTEN error for an address. gRPC reports no reason, so try a plain socket to find the reason.

    `key` is the configuration key of the address."""
    why, hint = str(e), None
    path = Path(address.path)
    try:
        with socket.socket(socket.AF_UNIX if address.path else family_of(address.host)) as probe:
            probe.bind(address.path or (address.host.strip("[]"), address.port))
        if address.path:
            path.unlink()
    except socket.gaierror:
        why, hint = f"the host name {address.host!r} does not resolve", "Write a name or address of this machine."
    except OSError as found:
        why = found.strerror or str(found)
        if address.path and path.exists() and not path.is_socket():
            why, hint = "what is there is no socket", "Move it away, or choose another path."
        elif address.path and not path.parent.is_dir():
            why, hint = f"there is no folder {str(path.parent)!r}", "Make the folder, or choose another path."
        elif found.errno == errno.EADDRINUSE:
            hint = "Stop the process that listens there, or choose another port."
    return error("CANNOT_LISTEN", f"{key} = {str(address)!r}: cannot listen there: {why}", hint=hint)


def family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
