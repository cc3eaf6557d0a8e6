"""The pages as they are served: to whom, with what, and what becomes of names that want to be markup."""

import base64
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest

from broker_sidecar.config import Config
from broker_sidecar.gate import Visitors, asks
from broker_sidecar.security.audit import Audit, Trail
from broker_sidecar.security.authentication import Authentication
from broker_sidecar.security.permissions import Permissions
from broker_sidecar.web.pages import overview
from seqdedupe.errors import SeqdedupeError
from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import Client, batch
from tests.broker_sidecar.metrics.scraping import address_of
from tests.broker_sidecar.web.conftest import Get, fetch

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\u202e"


def test_what_a_page_may_do(get: Get) -> None:
    for path in ("/", "/topic?name=nothing"):
        answer = get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        # Nothing comes from elsewhere, and nothing within is a script or a style.
        assert not re.search(r"(src|href)=\"(?!/)", answer.body)
        assert '<noscript><meta http-equiv="refresh" content="10"></noscript>' in answer.body
        assert not re.search(r"<style|style=|<script(?! src=)| on[a-z]+=", answer.body)
    for path in ("/page.css", "/page.js", "/icon.svg"):
        assert get(path).status == 200


def test_a_topic_its_producers_and_back(get: Get, client: Client, topic: str) -> None:
    names = [f"p-{k:03d}" for k in range(101)]
    epochs = client.epochs(topic, *names)
    client.publish_unary(topic, batch([(names[0], 41)], epochs, links={names[0]: -1}))
    overview = get(f"/?q={topic}")
    assert f'href="/topic?name={quote("persistent://public/default/" + topic, safe="")}"' in overview.body
    first = get(f"/topic?name={topic}")
    assert "<bdi>p-000</bdi>" in first.body
    assert re.search(r"Persisted[^>]*>41<", first.body)
    assert "p-100" not in first.body
    following = re.search(r'href="(/topic[^"]*)" rel="next"', first.body)
    assert following
    second = get(following[1].replace("&amp;", "&"))
    assert "p-100" in second.body
    assert "p-000" not in second.body
    one = get(f"/topic?name={topic}&producer=p-077")
    assert "<bdi>p-077</bdi>" in one.body
    assert "p-078" not in one.body
    assert "PRODUCER_NOT_FOUND" in get(f"/topic?name={topic}&producer=nobody").body


def test_names_that_want_to_be_markup(get: Get, client: Client, topic: str) -> None:
    client.open(topic, EVIL)
    found = quote(EVIL)
    pages = [f"/topic?name={topic}", f"/topic?name={topic}&producer={found}", f"/topic?name={found}", f"/?q={found}"]
    for path in (*pages, f"/?order={found}", f"/?offset={found}"):
        body = get(path).body
        assert "<img" not in body
        assert "\u202e" not in body
        assert re.findall(r"<script[^>]*>", body) == ['<script src="/page.js" defer>']
        assert "&lt;img" in body


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/topic", 400, "INVALID_TOPIC_NAME"),
        ("/topic?name=a%20b", 400, "INVALID_TOPIC_NAME"),
        ("/topic?name=not-there", 404, "TOPIC_NOT_FOUND"),
        ("/?order=size", 400, "INVALID_REQUEST"),
        ("/?offset=-1", 400, "INVALID_REQUEST"),
        ("/?offset=99999999999", 400, "INVALID_REQUEST"),
        ("/topic?name=x&after=9223372036854775808", 400, "INVALID_REQUEST"),
        ("/?offset=2147483647", 200, "Topics"),
        ("/?q=%00%ff", 200, "Topics"),
    ],
)
def test_bad_questions(get: Get, path: str, status: int, said: str) -> None:
    answer = get(path)
    assert (answer.status, said in answer.body) == (status, True)


def test_only_with_the_token(tmp_path: Path) -> None:
    with Sidecar(tmp_path, authentication="token", metrics_listen="127.0.0.1:0") as sidecar:
        url = f"http://{address_of(sidecar)}"
        token = sidecar.token_file.read_text().strip()
        for path in ("/", "/topic?name=x"):
            for password in (None, "", "wrong", token[:-1], token + "x", "ü"):
                answer = fetch(url + path, password)
                assert answer.status == 401
                assert answer.headers["WWW-Authenticate"].startswith("Basic ")
                assert token[:-1] not in answer.body
            for shown in (f"Bearer {token}", token, "Basic", "Basic !", f"Basic {token}"):
                assert fetch(url + path, Authorization=shown).status == 401
        assert fetch(url + "/", token).status == 200
        assert fetch(url + "/topic?name=x", token).status == 404
        assert fetch(url + "/page.css").status == 200
        assert fetch(url + "/metrics").status == 200


def _visitors(config: Config, trail: Trail) -> Visitors:
    authentication = Authentication(config, lambda why: None)
    guard: Any = SimpleNamespace(authentication=authentication, permissions=Permissions(), trail=trail)
    return Visitors(guard)


def _visitor(host: str, **headers: str) -> Any:
    return SimpleNamespace(client=(host, 1), headers=headers)


async def test_who_tries_tokens_stands_in_the_audit_trail(tmp_path: Path) -> None:
    trail = Trail(Audit(tmp_path / "audit.jsonl"))
    visitors = _visitors(Config(data_directory=str(tmp_path)), trail)
    for password in (b":wrong", b":another"):
        shown = "Basic " + base64.b64encode(password).decode()
        visitor = _visitor("127.0.0.1", Authorization=shown)
        with pytest.raises(SeqdedupeError, match="UNAUTHENTICATED"):
            await visitors.call(visitor, "GetStatistics", _answer, admin_pb2.GetStatisticsRequest())
    await trail.close()
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    told = [(line["call"], line["address"]) for line in lines if line["event"] == "unauthenticated"]
    assert told == [("AdminService/GetStatistics", "ipv4:127.0.0.1")] * 2
    assert "wrong" not in (tmp_path / "audit.jsonl").read_text()


async def _answer(request: admin_pb2.GetStatisticsRequest) -> str:
    return "answered"


@pytest.mark.parametrize(("authentication", "host", "reason"), [
    ("none", "10.0.0.1", ""),
    ("none", "127.0.0.1", ""),
    ("token", "127.0.0.1", ""),
    ("token", "::1", ""),
    ("token", "::ffff:127.0.0.1", ""),
    ("token", "10.0.0.1", "UNAUTHENTICATED"),
    ("token", "fe80::1%eth0", "UNAUTHENTICATED"),
])  # fmt: skip
async def test_a_token_is_taken_over_loopback_alone(
    tmp_path: Path, authentication: str, host: str, reason: str
) -> None:
    config = Config(data_directory=str(tmp_path), authentication=authentication)
    visitors = _visitors(config, Trail(None))
    headers = {}
    if authentication == "token":
        password = (tmp_path / "token").read_bytes().strip()
        headers = {"Authorization": "basic " + base64.b64encode(b":" + password).decode()}
    visitor = _visitor(host, **headers)
    request = admin_pb2.GetStatisticsRequest()
    if not reason:
        assert await visitors.call(visitor, "GetStatistics", _answer, request) == "answered"
    else:
        assert not asks(visitor)
        with pytest.raises(SeqdedupeError) as e:
            await visitors.call(visitor, "GetStatistics", _answer, request)
        assert e.value.reason == reason


def _found(**fields: Any) -> str:
    found = admin_pb2.GetStatisticsResponse(interval_ms=3000, **fields)
    return overview(found, "here", search="", order="rate", offset=0).body.decode()


def test_how_far_a_start_has_come() -> None:
    states = [
        admin_pb2.StateCount(state=admin_pb2.TOPIC_STATE_RECOVERING, topics=7),
        admin_pb2.StateCount(state=admin_pb2.TOPIC_STATE_SERVING, topics=1_213),
    ]
    body = _found(states=states, replay_left_messages=12_345)
    assert '<progress value="1213" max="1220"' in body
    assert "serving: 1,213 of 1,220 topics; 7 recovering" in body
    assert "still to be read: 12,345 messages" in body
    assert "<progress" not in _found(states=states[1:])


def test_warnings_and_errors_told() -> None:
    warnings = [admin_pb2.Warning(time_ms=0, level="ERROR", message=EVIL)]
    body = _found(warnings=warnings, refusals=[admin_pb2.ReasonCount(reason="FENCED", count=1_200)])
    assert "1970-01-01 00:00:00 UTC" in body
    assert "<img" not in body
    assert "<dt>FENCED</dt><dd>1,200</dd>" in body
    assert "None since the start." in _found()


def test_pages_of_topics() -> None:
    found = admin_pb2.GetStatisticsResponse(interval_ms=3000, topics_found=120)
    found.topics.add(topic=admin_pb2.Topic(name="persistent://a/b/c"))
    body = overview(found, "here", search="x y", order="name", offset=50).body.decode()
    assert 'href="/?q=x+y&amp;order=name" rel="prev"' in body
    assert 'href="/?q=x+y&amp;order=name&amp;offset=100" rel="next"' in body
