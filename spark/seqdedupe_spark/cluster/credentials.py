"""As whom a cluster is read: Pulsar's own names for it, and what they stand for. Nothing secret is ever in an error."""

import json
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.log.pulsar.pulsar_client import OAuth2, Token, from_file
from seqdedupe_spark.cluster.settings import Cluster
from seqdedupe_spark.session import path_of

_PARAMS = "pulsar.client.authParams"
_TOKEN = "token:"


def token_of(cluster: Cluster) -> Token | None:
    """What gives the token; None if there is none. Raises INVALID_OPTION."""
    params = cluster.credentials
    if cluster.authentication == "AuthenticationOAuth2":
        return _oauth2(params)
    if cluster.authentication != "AuthenticationToken":
        if params:
            raise error("INVALID_OPTION", f"{_PARAMS} is given, but no pulsar.client.authPluginClassName")
        return None
    if params.startswith(_TOKEN) and params != _TOKEN:
        return lambda: params.removeprefix(_TOKEN)
    if path := path_of(params):
        return from_file(Path(path))
    raise _wrong("token:… or file:///path")


def _oauth2(params: str) -> Token:
    try:
        given = json.loads(params)
        issuer_url, path, audience = given["issuerUrl"], path_of(given["privateKey"]), given.get("audience", "")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise _wrong('JSON, as {"issuerUrl": "https://…", "privateKey": "file:///path", "audience": "…"}') from None
    if path is None or urlsplit(issuer_url).scheme not in ("https", "http"):
        raise _wrong("such that privateKey is like file:///path, and issuerUrl like https://host")
    return OAuth2(issuer_url, Path(path), audience)


def _wrong(should_be: str) -> SeqdedupeError:
    return error("INVALID_OPTION", f"{_PARAMS}: it should be {should_be}")


def tls_of(cluster: Cluster) -> ssl.SSLContext | None:
    """For the admin calls, as strict as the client for messages is told to be. Raises INVALID_OPTION."""
    if not cluster.admin_url.startswith("https:"):
        return None
    try:
        context = ssl.create_default_context(cafile=cluster.trust_certs_path or None)
    except (OSError, ssl.SSLError) as e:
        what = f"pulsar.client.tlsTrustCertsFilePath is {cluster.trust_certs_path!r}: no certificate can be read ({e})"
        raise error("INVALID_OPTION", what) from e
    context.check_hostname = cluster.verifies_hostname and not cluster.allows_insecure
    if cluster.allows_insecure:
        context.verify_mode = ssl.CERT_NONE
    return context
