"""The keys of the configuration that begin with `pulsar.`: the cluster that holds the logs, if `log = "pulsar"`."""

import os
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from broker_sidecar.keys import SECRET, invalid, key
from seqdedupe.errors import SeqdedupeError
from seqdedupe.names import namespace_name

_SERVICE_URL = re.compile(r"pulsar(\+ssl)?://[^\s/@,]+(,[^\s/@,]+)*/?")
_ENTRY_FORMATS = ("plain", "packed")


@dataclass(frozen=True, kw_only=True)
class PulsarConfig:
    """All of them. Those about TLS are named as in Pulsar's `client.conf`."""

    service_url: str = key("", "Where Pulsar's brokers are: `pulsar://host:6650`, or `pulsar+ssl://host:6651`.")
    admin_url: str = key("", "Where their admin calls go: `http://host:8080`, or `https://host:8443`.")
    namespaces: str = key(
        "public/default", "The namespaces that are searched for topics, `tenant/namespace`, with commas between."
    )
    manage_topic_policies: bool = key(
        False, "Set a topic's own policies in Pulsar where they are not safe, instead of refusing the topic."
    )
    entry_format: str = key(
        "plain", "Of new topics: `plain`, a Pulsar message each, which any consumer reads; `packed`, a batch each."
    )
    token_file: str = key("", "File with the token for Pulsar. It is read anew whenever the token is needed.")
    token: str = key("", "The token itself. Only in the environment.", SECRET)
    oauth2_issuer_url: str = key("", "Who gives tokens for Pulsar: the issuer's URL (OAuth 2.0, client credentials).")
    oauth2_credentials_file: str = key("", "JSON file with `client_id` and `client_secret` for the issuer.")
    oauth2_audience: str = key("", "What the tokens are for, as the issuer names the cluster. Not all want it.")
    tls_trust_certs_file_path: str = key(
        "", "PEM file with the authorities that sign the brokers' certificates. Left out: the usual ones."
    )
    tls_enable_hostname_verification: bool = key(True, "Whether a broker's certificate must be for its host name.")
    tls_allow_insecure_connection: bool = key(False, "Take any certificate of a broker, for trials.")

    @property
    def has_oauth2(self) -> bool:
        return bool(self.oauth2_issuer_url or self.oauth2_credentials_file or self.oauth2_audience)

    @property
    def namespace_names(self) -> list[str]:
        return [name.strip() for name in self.namespaces.split(",")]

    def check(self) -> None:
        """For a sidecar whose log is Pulsar. Raises INVALID_CONFIGURATION."""
        for name, url in (("service_url", self.service_url), ("admin_url", self.admin_url)):
            if not url:
                raise invalid(f"pulsar.{name}", "is missing: with log = pulsar both URLs are needed")
        # What is in a URL may be a password, and is not shown.
        if not _SERVICE_URL.fullmatch(self.service_url):
            raise invalid("pulsar.service_url", "should be like pulsar://host:6650 or pulsar+ssl://host:6651")
        _check_http("pulsar.admin_url", self.admin_url, ("http", "https"))
        try:
            for name in self.namespace_names:
                namespace_name(name)
        except SeqdedupeError as e:
            raise invalid("pulsar.namespaces", f"is {self.namespaces!r}: {e.message}") from e
        if self.entry_format not in _ENTRY_FORMATS:
            raise invalid("pulsar.entry_format", f"is {self.entry_format!r}: it should be plain or packed")
        self._check_credentials()
        _check_file("pulsar.tls_trust_certs_file_path", self.tls_trust_certs_file_path)

    def _check_credentials(self) -> None:
        given = [
            name
            for name, is_given in (
                ("pulsar.token", self.token),
                ("pulsar.token_file", self.token_file),
                ("pulsar.oauth2_issuer_url", self.has_oauth2),
            )
            if is_given
        ]
        if len(given) > 1:
            raise invalid(given[1], f"is given, and {given[0]} too: one of them is enough")
        _check_file("pulsar.token_file", self.token_file)
        if self.has_oauth2:
            _check_http("pulsar.oauth2_issuer_url", self.oauth2_issuer_url, ("https", "http"))
            if not self.oauth2_credentials_file:
                raise invalid("pulsar.oauth2_credentials_file", "is needed with pulsar.oauth2_issuer_url")
            _check_file("pulsar.oauth2_credentials_file", self.oauth2_credentials_file)


def _check_http(name: str, url: str, schemes: tuple[str, ...]) -> None:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in schemes and bool(parts.hostname) and parts.username is None and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise invalid(name, "should be like http://host:8080 or https://host, without a user")


def _check_file(name: str, path: str) -> None:
    if path and not (os.path.isfile(path) and os.access(path, os.R_OK)):
        raise invalid(name, f"is {path!r}: there is no such file that can be read")
