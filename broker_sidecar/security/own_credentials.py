"""What this sidecar shows to others."""

import os
from pathlib import Path

from broker_sidecar.config import Config
from broker_sidecar.security import tokens
from seqdedupe.client.credentials import SIDECAR_USER, Credentials
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.store.directories import whole_of


def listed(config: Config, addresses: str) -> Sidecars | None:
    """The sidecars at these addresses, with what they are shown; None if there are none.

    Raises INVALID_CONFIGURATION for files that cannot be read.
    """
    try:
        return Sidecars.parse(addresses, _credentials(config)) if addresses else None
    except SeqdedupeError as e:
        raise error("INVALID_CONFIGURATION", f"what other sidecars are to be shown: {e.message}", hint=e.hint) from e


def _credentials(config: Config) -> Credentials:
    """The token of `peer_token_file`; among the workers of one data directory, which have one token, that."""
    token_file: str | Path | None = config.peer_token_file or None
    folder = Path(config.data_directory)
    if token_file is None and config.authentication == "token" and whole_of(folder) is not None:
        token_file = tokens.make(folder)
    has_tls = bool(config.tls_certificate_file)
    return Credentials(
        token_file=token_file,
        tls_ca_file=(config.peer_tls_ca_file or config.tls_client_ca_file or None) if has_tls else None,
        tls_certificate_file=config.tls_certificate_file or None,
        tls_key_file=config.tls_key_file or None,
        allow_insecure_token=config.allow_insecure_listen,
        sidecar_user=os.environ.get(SIDECAR_USER) or None,
    )
