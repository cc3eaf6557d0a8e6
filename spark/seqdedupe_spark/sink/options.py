"""The options of the sink: text from a user, checked, as one value that can be pickled."""

from collections.abc import Mapping
from dataclasses import dataclass

from seqdedupe.client.connection import DEFAULT_ADDRESS
from seqdedupe.names import topic_name
from seqdedupe_spark.options import Given, address, flag, sidecar_of
from seqdedupe_spark.session import Sidecar

NAMES = (
    "service.url",
    "topic",
    "failOnForgottenIds",
    "checkpointLocation",
    "authParams",
    "tlsTrustCertsFilePath",
    "tlsCertificateFilePath",
    "tlsKeyFilePath",
)
"""All options. The checkpoint's is Spark's own, which shows it to sinks where a query gives it; a write in
`foreachBatch` is given it by hand."""

_SPARK = ("queryName", "asyncProgressTrackingEnabled", "asyncProgressTrackingCheckpointIntervalMs")
"""What a query says to Spark, which passes it on to the sink."""


@dataclass(frozen=True)
class SinkOptions:
    """What a user said, or the defaults."""

    service: str | Sidecar
    topic: str | None = None
    """The full name; None: the column `__topic` says it of each row."""
    fail_on_forgotten_ids: bool = True
    checkpoint: str | None = None


def parse(options: Mapping[str, str]) -> SinkOptions:
    """The options, in any case. Raises ConfigurationError (INVALID_OPTION) that names the wrong one."""
    of_spark = {name.lower() for name in _SPARK}
    given = Given({name: value for name, value in options.items() if name.lower() not in of_spark}, NAMES)
    return SinkOptions(
        sidecar_of(given, given.take("service.url", _sidecar_address, DEFAULT_ADDRESS)),
        given.take("topic", topic_name, None),
        given.take("failOnForgottenIds", flag, True),
        given.take("checkpointLocation", str, None),
    )


def _sidecar_address(text: str) -> str:
    if text.startswith("pulsar"):
        raise ValueError("rows are written through a sidecar, as host:port or unix:path")
    return address(text)
