"""What keeps a sidecar from listening at an address."""

import errno
import socket
from pathlib import Path

from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error


def cannot_listen(address: SidecarAddress, e: Exception, key: str = "listen") -> SeqdedupeError:
    """What keeps a server from listening where `key` says. gRPC does not tell: so it is tried again by plain means."""
    why, hint = str(e), None
    path = Path(address.path)
    try:
        with socket.socket(socket.AF_UNIX if address.path else family_of(address.host)) as probe:
            probe.bind(address.path or (address.host.strip("[]"), address.port))
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
    return error("INVALID_CONFIGURATION", f"{key} = {str(address)!r}: cannot listen there: {why}", hint=hint)


def check_nobody_listens(address: SidecarAddress, key: str) -> None:
    """To be called before what takes long. Raises INVALID_CONFIGURATION if the port is taken; what else is wrong with
    an address turns out when it is listened at."""
    if address.path:
        return
    with socket.socket(family_of(address.host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host.strip("[]"), address.port))
        except OSError as e:
            if e.errno == errno.EADDRINUSE:
                raise cannot_listen(address, e, key) from e


def family_of(host: str) -> int:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
