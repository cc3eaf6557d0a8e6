"""The pages in a real browser, as somebody uses them."""

import re
from urllib.parse import quote

from seqdedupe.testing import Sidecar
from seqdedupe.v1 import admin_pb2
from tests.broker_sidecar.calls import Client, batch
from tests.broker_sidecar.web.browser import Browser, wait_for

EVIL = "<script>document.title='evil'</script>"
PHONE, DESK = (390, 844), (1280, 900)
TOPICS, PRODUCERS = 60, 101


def _fill(client: Client) -> None:
    """Topics with names that stretch a page, one of them in use, with a producer that wants to be markup."""
    for number in range(TOPICS):
        client.admin.CreateTopic(_topic(f"t-{number:02d}"))
    client.admin.CreateTopic(_topic("long-" + "x" * 200))
    client.open("t-07", EVIL, *(f"p-{number:03d}" for number in range(PRODUCERS - 1)))
    _publish(client, 0)


def _topic(name: str) -> admin_pb2.CreateTopicRequest:
    return admin_pb2.CreateTopicRequest(topic=name)


def _publish(client: Client, first: int) -> None:
    client.publish_unary("t-07", batch([("p-000", first + k) for k in range(10)], client.epochs("t-07", "p-000")))


def _fits(browser: Browser) -> bool:
    """Whether nothing has to be moved sideways to be read."""
    width, room = browser.run("return [document.documentElement.scrollWidth, window.innerWidth]")
    return bool(width <= room)


def _ground(browser: Browser) -> int:
    """How light the page is, from 0 to 255."""
    colour = browser.run("return getComputedStyle(document.body).backgroundColor")
    return max(map(int, re.findall(r"\d+", colour)[:3]))


def _stored(browser: Browser) -> str:
    return browser.run("return document.querySelector('.tile .note').innerText")  # type: ignore[no-any-return]


def test_somebody_looks_around(shared: Sidecar, client: Client, browser: Browser, url: str) -> None:
    _fill(client)
    browser.be(*DESK, "light")
    browser.open(url)
    assert browser.texts("h2")[:4] == ["Stored", "Duplicates", "Unknown", "Refused"]
    assert len(browser.texts("tbody tr")) == 50
    assert _ground(browser) > 200

    # It is live: what is published is shown without loading the page again.
    browser.run("window.sameDocument = true")
    before = _stored(browser)
    _publish(client, 10)
    wait_for(lambda: _stored(browser) != before)
    assert browser.run("return window.sameDocument")
    assert browser.run("return document.querySelectorAll('.tile path').length") >= 2
    assert "t-07" in browser.texts("tbody tr td.name")[0], "what was in use most recently comes first"

    # To the next page, and to a topic by its name.
    browser.click("a[rel=next]")
    wait_for(lambda: len(browser.texts("tbody tr")) == TOPICS + 1 - 50)
    browser.type("input[type=search]", "t-07")
    browser.click("form button")
    wait_for(lambda: len(browser.texts("tbody tr")) == 1)
    browser.click("td.name a")
    wait_for(lambda: "Producers" in browser.texts("h2"))

    # Its producers, none of which is markup.
    names = browser.texts(".producers td.name")
    assert (names[0], len(names)) == (EVIL, 100)
    row = browser.texts(".producers tr:nth-child(2) td")
    assert row[:3] == ["p-000", "19", "19"]
    browser.click("a[rel=next]")
    wait_for(lambda: browser.texts(".producers td.name") == [f"p-{PRODUCERS - 2:03d}"])
    assert browser.run("return document.title") != "evil"
    browser.click(".back a")
    wait_for(lambda: len(browser.texts("tbody tr")) == 50)

    # On a phone, in the dark; the longest name too.
    browser.be(*PHONE, "dark")
    for path in ("/", "/?q=long", f"/topic?name=long-{'x' * 200}", f"/topic?name=t-07&producer={quote(EVIL)}"):
        browser.open(url + path)
        assert _fits(browser), path
        assert _ground(browser) < 60
    assert browser.problems() == [], "nothing was refused, and no script failed"

    # When the sidecar has gone, the page says so.
    shared.kill()
    wait_for(lambda: "does not answer" in "".join(browser.texts("#stale")))
