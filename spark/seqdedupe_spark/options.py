"""The options of the data source and of the sink: text from a user is checked and converted to one object, which can be
pickled.

Begin with `parse`, or with `parse_sink`. The first part of the file defines places in topics at which reading starts or
stops (`Place`), and `advice`, the error text for an unknown option.
"""

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeGuard, TypeVar

from seqdedupe.address import DEFAULT_ADDRESS
from seqdedupe.client.route import Sidecars
from seqdedupe.errors import SeqdedupeError, error
from seqdedupe.message_id import Position
from seqdedupe.names import partition_name, topic_name
from seqdedupe_spark import stock
from seqdedupe_spark.service import AUTHENTICATIONS, PulsarCluster, Service, SidecarService, path_of

T = TypeVar("T")

# -- Where to start or stop in topics: text from a user, checked.

TURNED_ROUND = "Set startingOffsets or startingTime to a place before endingOffsets or endingTime."
"""The hint for an error when reading would start after its end."""

_MAX_INT64 = 2**63 - 1

_PARTITION = re.compile(r"\d{1,9}", re.ASCII)


@dataclass(frozen=True)
class Time:
    """A place in a topic: before the first message that was published at or after this time. If no such message exists
    when the place is resolved, the place is the end of the topic."""

    milliseconds: int


End = Literal["earliest", "latest"]
PlaceInTopic = Position | int | End | Time
"""A place in a topic. A number is an index: of the first message to read, or for an end, of the first message not to
read."""
Place = End | Time | Mapping[str, PlaceInTopic]
"""Where to start or stop in each topic. Topics in the mapping have full names."""


def offsets(text: str, words: tuple[End, ...]) -> Place:
    """Return the text if it is one of `words`; otherwise return a place for every topic, read from JSON. Raises
    ValueError, INVALID_POSITION."""
    forms = f'{" or ".join(words)}, or JSON, as {{"topic": "message ID"}} or {{"topic": index}}'
    return _word(text, words) or _by_topic(text, forms, lambda name, value: _offset(name, value, words))


def times(text: str) -> Place:
    """Return a time in milliseconds since 1970, or a time for every topic from JSON. Raises ValueError."""
    if re.fullmatch(r"[-+\w.]+", text):
        return Time(number(text, 0))
    return _by_topic(text, 'milliseconds since 1970, or JSON, as {"topic": milliseconds}', _time)


def check_order(starting: Place | None, ending: Place | None) -> None:
    """Raise INVALID_OPTION if the starting time is after the ending time. Other places are checked together with the
    topics."""
    for name in {*_names(starting), *_names(ending)} or {""}:
        first, last = _in_topic(starting, name), _in_topic(ending, name)
        if isinstance(first, Time) and isinstance(last, Time) and first.milliseconds > last.milliseconds:
            what = f"startingTime {first.milliseconds} is after endingTime {last.milliseconds}"
            raise error("INVALID_OPTION", what + (f" in {name}" if name else ""), hint=TURNED_ROUND)


def _names(place: Place | None) -> Iterable[str]:
    return place if isinstance(place, Mapping) else ()


def _in_topic(place: Place | None, name: str) -> PlaceInTopic | None:
    return place.get(name) if isinstance(place, Mapping) else place


def number(text: str, least: int) -> int:
    """Return the number. Raises ValueError."""
    if not re.fullmatch(r"\d{1,19}", text, re.ASCII) or not least <= int(text) <= _MAX_INT64:
        raise ValueError(f"it should be a whole number from {least} to 2^63 - 1")
    return int(text)


def _word(text: str, words: tuple[End, ...]) -> End | None:
    return next((word for word in words if word == text.lower()), None)


def _by_topic(text: str, forms: str, place: Callable[[str, object], T]) -> dict[str, T]:
    """Return a place for every topic, from JSON. As in Kafka's connector, the value of a topic may be a mapping from
    partition numbers to places. The result contains full topic names."""
    try:
        given = json.loads(text, object_pairs_hook=tuple)
    except (ValueError, RecursionError) as e:
        raise ValueError(f"it should be {forms}") from e
    if not isinstance(given, tuple) or not given:
        raise ValueError(f"it should be {forms}")
    places: dict[str, T] = {}
    for topic, value in given:
        name = topic_name(topic)
        of_partitions = value if isinstance(value, tuple) else ()
        parts = [(_partition(name, number), one) for number, one in of_partitions]
        for part, one in parts or [(name, value)]:
            if part in places:
                raise ValueError(f"{part} occurs twice")
            places[part] = place(part, one)
    return places


def _partition(topic: str, number: str) -> str:
    if not _PARTITION.fullmatch(number):
        raise ValueError(f"{number[:80]!r} is not the number of a partition of {topic}")
    return partition_name(topic, int(number))


def _offset(name: str, value: object, words: tuple[End, ...]) -> PlaceInTopic:
    if isinstance(value, str):
        return _word(value, words) or stock.parse(value)
    if _is_number(value):
        return value
    # A miscalculated negative index must not be read as Kafka's -1, the end: nobody would notice the missing messages.
    hint = '; Kafka\'s -1 is "latest" here, its -2 "earliest"' if value in (-1, -2) else ""
    raise ValueError(f"the value for {name} is neither an index from 0 up nor a text{hint}")


def _time(name: str, value: object) -> Time:
    if not _is_number(value):
        raise ValueError(f"the value for {name} is not a number of milliseconds from 0 up")
    return Time(value)


def _is_number(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MAX_INT64


# -- The error texts for unknown options: those of the connectors for Kafka and Pulsar, and those mistyped.

_ELSEWHERE = {
    "assign": "topics",
    "endingoffsetsbytimestamp": "endingTime",
    "endingtimestamp": "endingTime",
    "kafka.bootstrap.servers": "service.url",
    "kafkaconsumer.polltimeoutms": "readTimeoutSeconds",
    "maxmessagespertrigger": "maxOffsetsPerTrigger",
    "path": "topic",
    "polltimeoutms": "readTimeoutSeconds",
    "startingoffsetsbytimestamp": "startingTime",
    "startingtimestamp": "startingTime",
    "subscribe": "topics",
    "subscribepattern": "topicsPattern",
}
"""The options of other connectors, each with the option of this data source that has the same meaning."""

_NOBODY = "positions are in the query's checkpoint, not in a consumer group or subscription: omit it"
_WAITS = "a reader waits and resumes automatically: omit it"

_MEANINGLESS = {
    "allowdifferenttopicschemas": "the column value has bytes, for any schema: omit it",
    "fetchoffset.numretries": _WAITS,
    "fetchoffset.retryintervalms": _WAITS,
    "groupidprefix": _NOBODY,
    "includeheaders": "the column __messageProperties always exists: omit it",
    "kafka.group.id": _NOBODY,
    "predefinedsubscription": _NOBODY,
    "startingoffsetsbytimestampstrategy": "a time after the end means the end: omit it",
    "subscriptionprefix": _NOBODY,
    "subscriptiontype": _NOBODY,
    "waitingfornonexistedtopic": "topics must exist, but those of a topicsPattern may come later: omit it",
}
"""The options that have no meaning here, each with the reason."""

_FOREIGN = {
    "kafka.": "it is an option of Kafka's clients: set service.url, authParams and the tls… files instead",
    "pulsar.admin.": "it is an option of Pulsar's connector: only admin.url and pulsar.client.… exist here",
    "pulsar.producer.": "it is an option of Pulsar's connector: the client decides about batches and their times",
    "pulsar.reader.": "it is an option of Pulsar's connector: omit it",
}
"""Prefixes of options that have no meaning here, each with the reason."""


def advice(name: str, names: Sequence[str]) -> str:
    """Return advice about an unknown option. `name` is in lower case."""
    known = {one.lower(): one for one in names}
    near = difflib.get_close_matches(name, known, 1)
    elsewhere = _ELSEWHERE.get(name)
    instead = elsewhere if elsewhere in names else known[near[0]] if near else None
    if name in _MEANINGLESS:
        return _MEANINGLESS[name]
    if instead is not None:
        return f"did you mean {instead}?"
    for beginning, why in _FOREIGN.items():
        if name.startswith(beginning):
            return why
    return "choose from " + ", ".join(one for one in names if not one.startswith(("pulsar.", "admin.")))


NAMES = (
    "service.url",
    "topic",
    "topics",
    "topicsPattern",
    "startingOffsets",
    "startingTime",
    "endingOffsets",
    "endingTime",
    "maxOffsetsPerTrigger",
    "maxBytesPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "plainColumnNames",
    "pulsarColumns",
    "readTimeoutSeconds",
    "authParams",
    "tlsTrustCertsFilePath",
    "tlsCertificateFilePath",
    "tlsKeyFilePath",
    "admin.url",
    "pulsar.client.authPluginClassName",
    "pulsar.client.authParams",
    "pulsar.client.tlsTrustCertsFilePath",
    "pulsar.client.tlsAllowInsecureConnection",
    "pulsar.client.tlsHostnameVerificationEnable",
)
"""All options. Spark does not preserve upper and lower case in their names."""

_OF_TABLE = "option."
"""The prefix that Spark puts before the options of CREATE TABLE, which it passes together with its own properties."""

_MAX_TRIGGER_DELAY_SECONDS = 15 * 60.0
"""The same default as in Kafka's connector."""

_DELAY = re.compile(r"(\d{1,9})\s*(ms|s|m|min|h|d)?", re.ASCII)
_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_CREDENTIALS = "pulsar.client.authParams"
_BROKERS = re.compile(r"pulsar(\+ssl)?://[^\s/@,]+(,[^\s/@,]+)*/?")
_ADMIN = re.compile(r"https?://[^\s/@]+/?")
_AUTHENTICATION = re.compile(r"(?:org\.apache\.pulsar\.client\.impl\.auth\.(?:oauth2\.)?)?(\w+)")


@dataclass(frozen=True)
class Selection:
    """The selected topics: the topics with these full names, or the topics that match the pattern. `option` is the
    option that the user has set."""

    option: str
    names: tuple[str, ...] = ()
    pattern: str | None = None


@dataclass(frozen=True)
class Least:
    """The minimum for a trigger: this number of messages, or any messages after this delay since the last trigger."""

    messages: int
    delay_seconds: float


@dataclass(frozen=True)
class ReadLimits:
    """The limits on the messages and bytes that a trigger reads from all topics together. None means no limit."""

    messages: int | None = None
    size_bytes: int | None = None


NO_LIMITS = ReadLimits()


@dataclass(frozen=True)
class Options:
    """The user's options, or the default values of options that the user has not set. `starting` and `ending` are None
    if the user has not set them."""

    selection: Selection
    service: Service = DEFAULT_ADDRESS
    starting: Place | None = None
    ending: Place | None = None
    limits: ReadLimits = NO_LIMITS
    least: Least | None = None
    min_partitions: int = 1
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    plain_column_names: bool = False
    pulsar_columns: bool = False
    read_timeout_seconds: int | None = None


def parse(options: Mapping[str, str]) -> Options:
    """Return the options. Upper and lower case of their names are ignored. Raises ConfigurationError (INVALID_OPTION)
    that names the invalid option."""
    given = Given(options)
    limits = ReadLimits(
        given.take("maxOffsetsPerTrigger", _count, None), given.take("maxBytesPerTrigger", _count, None)
    )
    starting = _place(given, "startingOffsets", "startingTime", ("earliest", "latest"))
    ending = _place(given, "endingOffsets", "endingTime", ("latest",))
    check_order(starting, ending)
    return Options(
        selection=_selection(given),
        service=_service(given),
        starting=starting,
        ending=ending,
        limits=limits,
        least=_least(given, limits),
        min_partitions=given.take("minPartitions", _count, 1),
        max_records_per_partition=given.take("maxRecordsPerPartition", _count, None),
        fail_on_data_loss=given.take("failOnDataLoss", flag, True),
        plain_column_names=given.take("plainColumnNames", flag, False),
        pulsar_columns=given.take("pulsarColumns", flag, False),
        read_timeout_seconds=given.take("readTimeoutSeconds", _count, None),
    )


def _service(given: "Given") -> Service:
    service_url = given.take("service.url", _service_url, DEFAULT_ADDRESS)
    if not _BROKERS.fullmatch(service_url):
        if name := given.first_of("admin.url", "pulsar.client."):
            raise error("INVALID_OPTION", f"{name} is for service.url = pulsar://…, which reads from Pulsar's brokers")
        return sidecar_of(given, service_url)
    if name := given.first_of("authParams", "tls"):
        raise error("INVALID_OPTION", f"{name} is for a sidecar; for Pulsar's brokers it is pulsar.client.{name}")
    admin_url = given.take("admin.url", _admin_url, "")
    if not admin_url:
        raise error("INVALID_OPTION", f"admin.url is needed with service.url = {service_url}: as http://host:8080")
    return PulsarCluster(
        service_url,
        admin_url,
        given.take("pulsar.client.authPluginClassName", _authentication, ""),
        given.take(_CREDENTIALS, str, ""),
        given.take("pulsar.client.tlsTrustCertsFilePath", str, ""),
        given.take("pulsar.client.tlsAllowInsecureConnection", flag, False),
        given.take("pulsar.client.tlsHostnameVerificationEnable", flag, True),
        tells_keys=given.take("pulsarColumns", flag, False),
    )


def sidecar_of(given: "Given", address: str) -> str | SidecarService:
    """Return the sidecar at this address, with the files of the credentials for this sidecar. Raises INVALID_OPTION."""
    params = given.take("authParams", str, "")
    token_file = path_of(params) or ""
    if params and not token_file:
        raise error(
            "INVALID_OPTION",
            "authParams: it should be the URL of a token file, as file:///path",
            hint="Plans and logs show options. Write the token into a file that every executor has, or set "
            "spark.executorEnv.SEQDEDUPE_TOKEN_FILE.",
        )
    found = SidecarService(
        address,
        token_file,
        given.take("tlsTrustCertsFilePath", str, ""),
        given.take("tlsCertificateFilePath", str, ""),
        given.take("tlsKeyFilePath", str, ""),
    )
    return found if found != SidecarService(address) else address


FILE_OPTIONS = {
    "token_file": "authParams",
    "tls_ca_file": "tlsTrustCertsFilePath",
    "tls_certificate_file": "tlsCertificateFilePath",
    "tls_key_file": "tlsKeyFilePath",
}
"""The data source's options for a sidecar's credential files. The keys are the names of the same options in a
command."""


def file_options() -> dict[str, str]:
    """Return the options for the credential files that were given to the running command."""
    # Only commands need click, and tasks read options too.
    from seqdedupe.sidecar_options import told_files

    return {
        FILE_OPTIONS[name]: url_of(path) if name == "token_file" else os.path.abspath(path)
        for name, path in told_files().items()
    }


def url_of(path: str | os.PathLike[str]) -> str:
    """Return the URL of a file. A relative path is relative to the working directory of this process."""
    return Path(path).absolute().as_uri()


def of_table(given: Mapping[str, str]) -> dict[str, str]:
    """If `given` are the options of a table, return the options in `CREATE TABLE … USING seqdedupe OPTIONS (…)`."""
    return {name.removeprefix(_OF_TABLE): value for name, value in given.items() if name.startswith(_OF_TABLE)}


def check_shows_no_secret(of_table: Mapping[str, str]) -> None:
    """Raise INVALID_OPTION if a table's options contain a token, because the catalog shows a table's options."""
    given = next((value for name, value in of_table.items() if name.lower() == _CREDENTIALS.lower()), "")
    if given.strip().startswith("token:"):
        raise error(
            "INVALID_OPTION", f"{_CREDENTIALS}: a table would show the token: give a file instead, as file:///path"
        )


def _service_url(text: str) -> str:
    return text if _BROKERS.fullmatch(text) else address(text)


def _admin_url(text: str) -> str:
    if not _ADMIN.fullmatch(text):
        raise ValueError("it should be like http://host:8080 or https://host, without a user")
    return text


def _authentication(text: str) -> str:
    found = _AUTHENTICATION.fullmatch(text)
    if not found or found[1] not in AUTHENTICATIONS:
        raise ValueError(f"it should be {' or '.join(AUTHENTICATIONS)}")
    return found[1]


def address(text: str) -> str:
    """Check the form of one sidecar's address, or of several addresses. Return the text unchanged. Raises
    ValueError."""
    try:
        Sidecars.parse(text)
    except SeqdedupeError:
        what = "host:port or unix:path, without a scheme, or several separated by commas, or pulsar://host:6650"
        raise ValueError(f"it should be {what}") from None  # it may have a password
    return text


class Given:
    """The options that the user has set, by name. The constructor raises INVALID_OPTION for an option whose name is not
    in `names`."""

    def __init__(self, options: Mapping[str, str], names: Sequence[str] = NAMES) -> None:
        said = {name.lower(): str(value) for name, value in options.items()}
        self._values = of_table(said) or said
        known = {name.lower(): name for name in names}
        for name in self._values.keys() - known.keys():
            raise error("INVALID_OPTION", f"there is no option {name}: {advice(name, names)}")

    def one_of(self, *names: str) -> str | None:
        """Return the one option of `names` that the user has set; None if the user has set none of these options.
        Raises INVALID_OPTION if the user has set several of these options."""
        said = [name for name in names if name.lower() in self._values]
        if len(said) > 1:
            raise error("INVALID_OPTION", f"{' and '.join(said)} contradict each other: give one of them")
        return said[0] if said else None

    def first_of(self, *beginnings: str) -> str | None:
        """Return the first option that the user has set and whose name begins with one of these prefixes; None if the
        user has set no such option."""
        return next((name for name in NAMES if name.lower() in self._values and name.startswith(beginnings)), None)

    def take(self, name: str, convert: Callable[[str], T], default: T) -> T:
        """Return the converted value of an option, or `default` if the user has not set the option. If `convert` raises
        ValueError, this method raises INVALID_OPTION with the text of the ValueError."""
        text = self._values.get(name.lower())
        if text is None:
            return default
        try:
            return convert(text.strip())
        except (ValueError, SeqdedupeError) as e:
            why = e.message if isinstance(e, SeqdedupeError) else e
            # The text before an @ may be a password.
            said = f"{name} is {text[:80]!r}" if "@" not in text else name
            raise error("INVALID_OPTION", f"{said}: {why}") from e


def _selection(given: Given) -> Selection:
    option = given.one_of("topic", "topics", "topicsPattern")
    if option is None:
        raise error("INVALID_OPTION", "no topic is named: give one of the options topic, topics and topicsPattern")
    if option == "topicsPattern":
        return Selection(option, pattern=given.take(option, _pattern, ""))
    return Selection(option, names=given.take(option, _one_topic if option == "topic" else _topics, ()))


def _place(given: Given, by_offset: str, by_time: str, words: tuple[End, ...]) -> Place | None:
    if given.one_of(by_offset, by_time) == by_time:
        return given.take(by_time, times, None)
    return given.take(by_offset, lambda text: offsets(text, words), None)


def _least(given: Given, limits: ReadLimits) -> Least | None:
    messages = given.take("minOffsetsPerTrigger", _count, None)
    delay = given.take("maxTriggerDelay", _delay_seconds, None)
    if messages is None:
        if delay is not None:
            raise error("INVALID_OPTION", "maxTriggerDelay limits the wait for minOffsetsPerTrigger: give both")
        return None
    if limits.messages is not None and messages > limits.messages:
        what = f"minOffsetsPerTrigger is {messages}, more than maxOffsetsPerTrigger, {limits.messages}"
        raise error("INVALID_OPTION", what)
    return Least(messages, _MAX_TRIGGER_DELAY_SECONDS if delay is None else delay)


def _delay_seconds(text: str) -> float:
    found = _DELAY.fullmatch(text.lower())
    if not found:
        raise ValueError("it should be like 15m, 90s or 500ms")
    return int(found[1]) * _UNIT_SECONDS[found[2] or "ms"]


def _one_topic(text: str) -> tuple[str, ...]:
    return (topic_name(text),)


def _topics(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(topic_name(name.strip()) for name in text.split(",")))


def _pattern(text: str) -> str:
    try:
        re.compile(text)
    except re.error as e:
        raise ValueError(f"it is not a regular expression: {e}") from e
    return text


def _count(text: str) -> int:
    return number(text, 1)


def flag(text: str) -> bool:
    """Return the flag. Raises ValueError."""
    if text.lower() not in ("true", "false"):
        raise ValueError("it should be true or false")
    return text.lower() == "true"


# -- The options of the sink: text from a user, checked, as one value that can be pickled.

SINK_NAMES = (
    "service.url",
    "topic",
    "failOnForgottenIds",
    "checkpointLocation",
    "authParams",
    "tlsTrustCertsFilePath",
    "tlsCertificateFilePath",
    "tlsKeyFilePath",
)
"""All options of the sink. The checkpoint's option belongs to Spark: Spark passes it to the sink if a query has a
checkpoint. For a write in `foreachBatch` the user passes it."""

_SPARK = ("queryName", "asyncProgressTrackingEnabled", "asyncProgressTrackingCheckpointIntervalMs")
"""The query options that are for Spark itself, and that Spark also passes to the sink."""


@dataclass(frozen=True)
class SinkOptions:
    """The user's options, or the defaults."""

    service: str | SidecarService
    topic: str | None = None
    """The full name of the topic. None: the column `__topic` contains the topic of each row."""
    fail_on_forgotten_ids: bool = True
    checkpoint: str | None = None


def parse_sink(options: Mapping[str, str]) -> SinkOptions:
    """Return the options. Upper and lower case of their names are ignored. Raises ConfigurationError (INVALID_OPTION)
    that names the invalid option."""
    of_spark = {name.lower() for name in _SPARK}
    given = Given({name: value for name, value in options.items() if name.lower() not in of_spark}, SINK_NAMES)
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
