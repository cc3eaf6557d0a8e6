"""What it means when gRPC has no connection: the one place that reads its words."""

from seqdedupe.address import SidecarAddress
from seqdedupe.errors import SeqdedupeError, error

_NEVER_CONNECTED = ("failed to connect", "errors resolving", "DNS resolution failed")
"""What gRPC says where nothing can have been sent."""

_HINTS = {
    "errors resolving": "Is the host's name right? It could not be found.",
    "DNS resolution failed": "Is the host's name right? It could not be found.",
    "refused": "Nothing listens there: is the sidecar running, and is this its address?",
    "No such file": "There is no such socket: is the sidecar running, and is this its path?",
    "Permission denied": "May this user use the socket?",
    "HTTP": "Something other than a sidecar listens there: is the port right?",
    "Socket closed": "It ends the connection at once. Does the sidecar want TLS (tls_ca_file), or a certificate of the "
    "client's that is valid and that it knows (tls_certificate_file)? It says why with GRPC_VERBOSITY=INFO in its "
    "environment.",
}
"""By what gRPC says."""

_OTHER_HOST = "call host does not match"

_TLS_HINTS = {
    "WRONG_VERSION_NUMBER": "What listens there speaks no TLS: is the port right, and does the sidecar have a "
    "tls_certificate_file? Without TLS leave tls_ca_file out.",
    "Hostname Verification": "The certificate that listens there is not of this host name or IP address: use one that "
    "it names, or give the sidecar a certificate that names this one.",
    _OTHER_HOST: "The certificate that listens there is not of this host name or IP address: its common name alone "
    "does not count.",
    "certificate has expired": "The sidecar's certificate has expired: give it a new one. Or is this machine's clock "
    "wrong?",
    "certificate is not yet valid": "The sidecar's certificate is not valid yet: is a clock wrong, here or there?",
    "CERTIFICATE_VERIFY_FAILED": "The sidecar's certificate is of no authority that is believed here: tls_ca_file "
    "(SEQDEDUPE_TLS_CA_FILE) has to hold the certificate of the one that issued it.",
    "security handshaker": "Are the TLS files PEM, and is tls_key_file the key of tls_certificate_file?",
    "Tls handshake failed": None,
    "Custom verification check failed": None,
}
"""The same where it was TLS that failed. None: that of the reason."""


def unreachable(address: SidecarAddress, details: str) -> SeqdedupeError:
    """The error for what gRPC says of a connection that could not be made, or is lost: TLS_FAILED or UNREACHABLE."""
    if is_of_tls(details):
        hint = next(hint for sign, hint in _TLS_HINTS.items() if sign in details)
        return error("TLS_FAILED", f"no TLS connection to the sidecar at {address}: {details}", hint=hint)
    is_new = any(sign in details for sign in _NEVER_CONNECTED)
    hint = next((hint for sign, hint in _HINTS.items() if is_new and sign in details), None)
    return error("UNREACHABLE", f"no connection to the sidecar at {address}: {details}", hint=hint)


def is_of_tls(details: str) -> bool:
    """Whether somebody is there, and it is TLS that does not come about with them."""
    return any(sign in details for sign in _TLS_HINTS)


def is_of_another_host(details: str) -> bool:
    """Whether gRPC says, of a call, that the certificate is of another host. (It looks at the common name when it
    connects, and not when it calls.)"""
    return _OTHER_HOST in details


def was_never_sent(failure: SeqdedupeError) -> bool:
    """Whether it is certain that the call did not reach a sidecar."""
    if failure.reason == "UNREACHABLE":
        return any(sign in failure.message for sign in _NEVER_CONNECTED)
    return failure.reason in ("TLS_FAILED", "CREDENTIALS_UNAVAILABLE", "UNTRUSTED_LISTENER")
