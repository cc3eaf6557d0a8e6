"""The data source's options: what is taken, and what is said of each wrong one."""

import pickle
import re
from pathlib import Path

import pytest

from seqdedupe.errors import ConfigurationError, InvalidRequestError
from seqdedupe.log.pulsar.tokens import OAuth2
from seqdedupe.message_id import MessageId, Position
from seqdedupe.names import topic_name
from seqdedupe_spark.cluster.broker_connection import token_of
from seqdedupe_spark.options import Least, Options, ReadLimits, Selection, Time, parse
from seqdedupe_spark.service import PulsarCluster
from seqdedupe_spark.source import SeqdedupeDataSource

CLUSTER = {"topic": "t", "service.url": "pulsar+ssl://a:6651,b", "admin.url": "https://a"}
T = "persistent://public/default/t"


def test_what_is_not_said() -> None:
    assert parse({"topic": "t"}) == Options(Selection("topic", (T,)))
    assert parse({"topic": "t"}).service == "127.0.0.1:6660"
    assert parse({"topic": "t"}).fail_on_data_loss


def test_all_options_in_any_case() -> None:
    options = parse(
        {
            "SERVICE.URL": "unix:/run/s.sock",
            "Topics": "t, persistent://a/b/c ,t",
            "startingoffsets": '{"t": "5:7", "persistent://a/b/c": "5/start@-1"}',
            "endingtime": "1700000000000",
            "maxOffsetsPerTrigger": "7",
            "maxbytespertrigger": " 8 ",
            "minOffsetsPerTrigger": "5",
            "maxTriggerDelay": "90 S",
            "minPartitions": "9",
            "maxRecordsPerPartition": "10",
            "failOnDataLoss": "FALSE",
            "plaincolumnnames": "true",
        }
    )
    assert options == Options(
        Selection("topics", (T, "persistent://a/b/c")),
        "unix:/run/s.sock",
        {T: Position(5, MessageId(5, 7), 7), "persistent://a/b/c": Position.start(5)},
        Time(1_700_000_000_000),
        ReadLimits(7, 8),
        Least(5, 90.0),
        9,
        10,
        fail_on_data_loss=False,
        plain_column_names=True,
    )
    assert pickle.loads(pickle.dumps(options)) == options


@pytest.mark.parametrize("text", ["earliest", "latest", "Latest"])
def test_words(text: str) -> None:
    assert parse({"topicsPattern": "t.*", "startingOffsets": text}).starting == text.lower()
    assert parse({"topic": "t", "startingOffsets": f'{{"t": "{text}"}}'}).starting == {T: text.lower()}


@pytest.mark.parametrize(
    "given",
    [
        Position.start(5),
        Position(5, MessageId(5, 7), 7),
        Position(5, MessageId(9, 2, 3), 7),
        Position(2**63 - 1, MessageId(1, 2**63 - 1), 2**63 - 1),
    ],
)
def test_positions_come_back_from_their_text(given: Position) -> None:
    assert Position.parse(str(given)) == given


@pytest.mark.parametrize(
    "text",
    [
        "",
        "5",
        "5:",
        ":7",
        "5:7 ",
        " 5:7",
        "+5:7",
        "5:-7",
        "5_0:7",
        "٥:7",
        "5:7:1:1",
        "start",
        "5/start",
        "5/start@0",
        "5/5:7",
        "5:7@7",
        "5/5:7@-1",
        "5/5:7@",
        "-5/5:7@7",
        "5/5:7@7\n",
        f"5/5:7@{2**63}",
        f"{2**63}/5:7@7",
        f"5:{2**63}",
        f"5/{2**63}:7@7",
        "9" * 5000 + ":1",
    ],
)
def test_what_is_no_position(text: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"position|message ID"):
        Position.parse(text)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "topic, topics and topicsPattern"),
        ({"topic": "t", "topics": "u"}, "topic and topics contradict"),
        ({"topic": "t", "topicsPattern": "u"}, "topic and topicsPattern contradict"),
        ({"topic": "t", "startingOffsets": "latest", "startingTime": "1"}, "startingOffsets and startingTime contr"),
        ({"topic": "t", "endingOffsets": "latest", "endingTime": "1"}, "endingOffsets and endingTime contr"),
        ({"topik": "t"}, "no option topik: did you mean topic?"),
        ({"topic": "t", "subscribe": "t"}, "no option subscribe: did you mean topics?"),
        ({"topic": "t", "pollTimeoutMs": "1"}, "no option polltimeoutms: did you mean readTimeoutSeconds?"),
        ({"topic": "t", "xyz": "1"}, "no option xyz: choose from service.url, topic"),
        ({"topic": "t", "kafka.bootstrap.servers": "a"}, "did you mean service.url?"),
        ({"topic": "t", "kafka.group.id": "g"}, "not in a consumer group or subscription"),
        ({"topic": "t", "predefinedSubscription": "s"}, "not in a consumer group or subscription"),
        ({"topic": "t", "includeHeaders": "true"}, "the column __messageProperties always exists"),
        ({"topic": "t", "startingOffsetsByTimestamp": "{}"}, "did you mean startingTime?"),
        ({"topic": "t", "endingTimestamp": "1"}, "did you mean endingTime?"),
        ({"topic": "t", "startingOffsetsByTimestampStrategy": "error"}, "a time after the end means the end"),
        ({"topic": "t", "minOffsetPerTrigger": "5"}, "did you mean minOffsetsPerTrigger?"),
        ({"topic": "t", "waitingForNonExistedTopic": "true"}, "topics must exist"),
        ({"topic": "t", "allowDifferentTopicSchemas": "true"}, "the column value has bytes"),
        ({"topic": "t", "kafka.security.protocol": "SSL"}, "it is an option of Kafka's clients"),
        ({"topic": "t", "pulsar.reader.receiverQueueSize": "5"}, "it is an option of Pulsar's connector"),
        ({"topic": "t", "pulsar.client.authParam": "x"}, "did you mean pulsar.client.authParams?"),
        ({"topic": "t", "maxOffsetPerTriger": "1"}, "did you mean maxOffsetsPerTrigger?"),
        ({"path": "t"}, "no option path: did you mean topic?"),
        ({"topic": ""}, "topic is ''"),
        ({"topic": "a b"}, "topic is 'a b'"),
        ({"topics": "a,,b"}, "topics is 'a,,b'"),
        ({"topicsPattern": "("}, "topicsPattern is '(': it is not a regular expression"),
        ({"topic": "t", "service.url": "http://a:1"}, "service.url is 'http://a:1'"),
        ({"topic": "t", "service.url": "grpc://a:1"}, "service.url is 'grpc://a:1'"),
        ({"topic": "t", "service.url": "localhost"}, "service.url is 'localhost'"),
        (CLUSTER | {"service.url": "pulsar://u:secret@a"}, "service.url: it should be host:port"),
        (CLUSTER | {"service.url": "pulsar+tls://a"}, "or pulsar://host:6650"),
        ({"topic": "t", "service.url": "pulsar://a:6650"}, "admin.url is needed with service.url = pulsar://a:6650"),
        (CLUSTER | {"admin.url": "a:8080"}, "admin.url is 'a:8080': it should be like http://host:8080"),
        (CLUSTER | {"admin.url": "http://u:secret@a"}, "admin.url: it should be like http://host:8080"),
        (
            CLUSTER | {"pulsar.client.authPluginClassName": "AuthenticationAthenz"},
            "it should be AuthenticationToken or",
        ),
        ({"topic": "t", "admin.url": "http://a:8080"}, "admin.url is for service.url = pulsar://"),
        ({"topic": "t", "pulsar.client.authParams": "token:secret"}, "pulsar.client.authParams is for service.url"),
        ({"topic": "t", "startingOffsets": "erliest"}, "startingOffsets is 'erliest': it should be earliest or latest"),
        ({"topic": "t", "startingOffsets": "[]"}, "startingOffsets is '[]': it should be"),
        ({"topic": "t", "startingOffsets": "{}"}, "startingOffsets is '{}': it should be"),
        ({"topic": "t", "startingOffsets": "[" * 100_000}, "startingOffsets is '[[["),
        ({"topic": "t", "startingOffsets": '{"t": -7}'}, "is neither an index from 0 up nor a text"),
        ({"topic": "t", "startingOffsets": '{"t": true}'}, "is neither an index"),
        ({"topic": "t", "startingOffsets": '{"t": -1}'}, 'Kafka\'s -1 is "latest" here, its -2 "earliest"'),
        ({"topic": "t", "startingOffsets": '{"t": {"a": "5:7"}}'}, "'a' is not the number of a partition of"),
        ({"topic": "t", "startingOffsets": '{"t": {"0": {"0": 1}}}'}, "is neither an index"),
        ({"topic": "t", "startingOffsets": '{"t": {}}'}, "is neither an index"),
        ({"topic": "t", "startingOffsets": '{"t": {"0": 1}, "t-partition-0": 2}'}, "t-partition-0 occurs twice"),
        ({"topic": "t", "startingOffsets": '{"t": "7"}'}, "startingOffsets is '{\"t\": \"7\"}': '7' is neither"),
        ({"topic": "t", "startingOffsets": '{"t": "1:7", "t": "1:8"}'}, "twice"),
        ({"topic": "t", "startingOffsets": f'{{"t": "1:7", "{T}": "1:8"}}'}, "twice"),
        ({"topic": "t", "startingOffsets": '{"a b": "1:7"}'}, "'a b' is not a topic name"),
        ({"topic": "t", "endingOffsets": "earliest"}, "endingOffsets is 'earliest': it should be latest"),
        ({"topic": "t", "endingOffsets": '{"t": "earliest"}'}, "'earliest' is neither"),
        ({"topic": "t", "startingTime": "yesterday"}, "startingTime is 'yesterday'"),
        ({"topic": "t", "startingTime": "-1"}, "startingTime is '-1'"),
        ({"topic": "t", "endingTime": str(2**63)}, "endingTime is"),
        ({"topic": "t", "endingTime": "[1]"}, 'milliseconds since 1970, or JSON, as {"topic": milliseconds}'),
        ({"topic": "t", "startingTime": '{"t": -1}'}, "is not a number of milliseconds from 0 up"),
        ({"topic": "t", "startingTime": '{"t": "latest"}'}, "is not a number of milliseconds"),
        ({"topic": "t", "startingTime": '{"t": true}'}, "is not a number of milliseconds"),
        ({"topic": "t", "startingTime": '{"t": 1, "t": 2}'}, "twice"),
        ({"topic": "t", "maxOffsetsPerTrigger": "0"}, "maxOffsetsPerTrigger is '0'"),
        ({"topic": "t", "maxBytesPerTrigger": "1.5"}, "maxBytesPerTrigger is '1.5'"),
        ({"topic": "t", "minOffsetsPerTrigger": "0"}, "minOffsetsPerTrigger is '0'"),
        (
            {"topic": "t", "minOffsetsPerTrigger": "8", "maxOffsetsPerTrigger": "7"},
            "minOffsetsPerTrigger is 8, more than maxOffsetsPerTrigger, 7",
        ),
        ({"topic": "t", "maxTriggerDelay": "5m"}, "maxTriggerDelay limits the wait for minOffsetsPerTrigger"),
        ({"topic": "t", "minOffsetsPerTrigger": "1", "maxTriggerDelay": "1w"}, "it should be like 15m, 90s or 500ms"),
        ({"topic": "t", "minOffsetsPerTrigger": "1", "maxTriggerDelay": "-1s"}, "maxTriggerDelay is '-1s'"),
        ({"topic": "t", "maxRecordsPerPartition": "0"}, "maxRecordsPerPartition is '0'"),
        ({"topic": "t", "minPartitions": "٣"}, "minPartitions is"),
        ({"topic": "t", "failOnDataLoss": "no"}, "failOnDataLoss is 'no': it should be true or false"),
        ({"topic": "t", "plainColumnNames": ""}, "plainColumnNames is ''"),
        ({"topic": "t", "pulsarColumns": "yes"}, "pulsarColumns is 'yes'"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(options: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigurationError) as failure:
        parse(options)
    assert failure.value.reason == "INVALID_OPTION"
    assert said in failure.value.message
    assert "\n" not in failure.value.message
    assert len(failure.value.message) < 400
    assert "secret" not in failure.value.message


def test_a_cluster() -> None:
    options = parse(
        CLUSTER
        | {
            "pulsar.client.authPluginClassName": "org.apache.pulsar.client.impl.auth.AuthenticationToken",
            "pulsar.client.authParams": "token:secret",
            "pulsar.client.tlsTrustCertsFilePath": "/ca.pem",
            "pulsar.client.tlsAllowInsecureConnection": "true",
            "pulsar.client.tlsHostnameVerificationEnable": "false",
        }
    )
    assert options.service == PulsarCluster(
        "pulsar+ssl://a:6651,b", "https://a", "AuthenticationToken", "token:secret", "/ca.pem", True, False
    )
    assert "secret" not in repr(options)
    assert parse(CLUSTER).service == PulsarCluster("pulsar+ssl://a:6651,b", "https://a")


def test_a_table_shows_no_token() -> None:
    given = {f"option.{name}": value for name, value in CLUSTER.items()} | {"topic": "t"}
    with pytest.raises(ConfigurationError, match="a table would show the token") as failure:
        SeqdedupeDataSource(given | {"option.pulsar.client.authparams": "token:secret"}).schema()
    assert "secret" not in str(failure.value)
    SeqdedupeDataSource(given | {"option.pulsar.client.authparams": "file:///token"}).schema()


@pytest.mark.parametrize(
    ("plugin", "params", "said"),
    [
        ("", "token:secret", "without pulsar.client.authPluginClassName"),
        ("AuthenticationToken", "secret", "token:… or file:///path"),
        ("AuthenticationToken", "file://host/secret", "token:… or file:///path"),
        ("AuthenticationOAuth2", "secret", "it should be JSON"),
        ("AuthenticationOAuth2", '["secret"]', "it should be JSON"),
        ("AuthenticationOAuth2", '{"issuerUrl": "https://a", "privateKey": "data:secret"}', "like file:///path"),
    ],
)
def test_wrong_credentials_are_not_shown(plugin: str, params: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said) as failure:
        token_of(PulsarCluster("pulsar://a", "http://a", plugin, params))
    assert "secret" not in str(failure.value)


def test_tokens(tmp_path: Path) -> None:
    (tmp_path / "to ken").write_text(" abc\n")
    for params in ("token:abc", (tmp_path / "to ken").as_uri()):
        token = token_of(PulsarCluster("pulsar://a", "http://a", "AuthenticationToken", params))
        assert token
        assert token() == "abc"
    oauth2 = '{"issuerUrl": "https://a", "privateKey": "file:///key.json"}'
    assert isinstance(token_of(PulsarCluster("pulsar://a", "http://a", "AuthenticationOAuth2", oauth2)), OAuth2)
    assert token_of(PulsarCluster("pulsar://a", "http://a")) is None


def test_an_index_is_a_place() -> None:
    assert parse({"topic": "t", "startingOffsets": '{"t": 7, "u": "latest"}'}).starting == {
        topic_name("t"): 7,
        topic_name("u"): "latest",
    }


def test_places_by_partition_as_kafka_has_them() -> None:
    given = '{"t": {"0": 23, "11": "earliest"}, "u": "5:7"}'
    assert parse({"topics": "t,u", "startingOffsets": given}).starting == {
        topic_name("t-partition-0"): 23,
        topic_name("t-partition-11"): "earliest",
        topic_name("u"): Position(5, MessageId(5, 7), 7),
    }
    assert parse({"topic": "t", "startingTime": '{"t": {"1": 0}}'}).starting == {topic_name("t-partition-1"): Time(0)}


def test_a_time_for_each_topic() -> None:
    options = parse({"topics": "t,u", "startingTime": '{"t": 5, "u": 1700000000000}'})
    assert options.starting == {topic_name("t"): Time(5), topic_name("u"): Time(1_700_000_000_000)}
    assert parse({"topic": "t", "endingTime": " 7 "}).ending == Time(7)


@pytest.mark.parametrize(
    ("first", "last", "said"),
    [
        ("8", "7", "startingTime 8 is after endingTime 7$"),
        ('{"t": 5, "u": 8}', "7", "startingTime 8 is after endingTime 7 in .*/u$"),
        ("8", '{"t": 9, "u": 7}', "startingTime 8 is after endingTime 7 in .*/u$"),
        ('{"t": 5, "u": 8}', '{"t": 6, "u": 7}', "startingTime 8 is after endingTime 7 in .*/u$"),
        ("7", "7", None),
        ('{"t": 5, "u": 8}', '{"t": 5, "u": 9}', None),
    ],
)
def test_times_that_are_turned_round(first: str, last: str, said: str | None) -> None:
    given = {"topics": "t,u", "startingTime": first, "endingTime": last}
    if said is None:
        parse(given)
        return
    with pytest.raises(ConfigurationError) as failure:
        parse(given)
    assert re.search(said, failure.value.message)
    assert "startingTime to a place before" in failure.value.hint


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, 900), ("15", 0.015), ("0", 0), ("20ms", 0.02), ("2m", 120), ("2min", 120), ("1 D", 86400)],
)
def test_delays(text: str | None, seconds: float) -> None:
    given = {} if text is None else {"maxTriggerDelay": text}
    least = parse({"topic": "t", "minOffsetsPerTrigger": "5"} | given).least
    assert least
    assert least.delay_seconds == pytest.approx(seconds)


def test_options_of_a_table_are_taken() -> None:
    """As Spark hands them over after `CREATE TABLE … USING seqdedupe OPTIONS (topic 't')`."""
    given = {"option.topic": "t", "topic": "t", "provider": "seqdedupe", "owner": "root"}
    assert parse(given) == parse({"topic": "t"})
