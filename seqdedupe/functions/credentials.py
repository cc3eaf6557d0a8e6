"""What a function shows the sidecar: files, or a secret that Pulsar's provider of secrets keeps."""

from collections.abc import Callable

from seqdedupe.client.credentials import Credentials
from seqdedupe.errors import error
from seqdedupe.functions.settings import Settings


def credentials_of(settings: Settings, get_secret: Callable[[str], str | None]) -> Credentials:
    """What userConfig names, and for the rest what the environment says. The secret is asked for again and again.

    Raises INVALID_FUNCTION if there is no such secret, INVALID_CREDENTIALS.
    """
    name = settings.sidecar_token_secret
    if name and get_secret(name) is None:
        raise error(
            "INVALID_FUNCTION",
            f"sidecar_token_secret is {name!r} in userConfig: the function was deployed without this secret",
        )
    return Credentials.from_environment(
        token=(lambda: get_secret(name) or "") if name else None,
        token_file=settings.sidecar_token_file,
        tls_ca_file=settings.sidecar_tls_ca_file,
        tls_certificate_file=settings.sidecar_tls_certificate_file,
        tls_key_file=settings.sidecar_tls_key_file,
    )
