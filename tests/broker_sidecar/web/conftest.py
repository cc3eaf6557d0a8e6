"""A sidecar with pages, and a browser to look at them, where there is one."""

import base64
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.message import Message
from urllib.error import HTTPError

import pytest

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.broker_sidecar.metrics.scraping import address_of
from tests.broker_sidecar.web.browser import Browser
from tests.tiers import BROWSER

TIMEOUT_SECONDS = LAST_RESORT_SECONDS


@dataclass(frozen=True)
class Answer:
    """What a server has answered."""

    status: int
    headers: Message
    body: str


Get = Callable[..., Answer]


def fetch(url: str, password: str | None = None, **headers: str) -> Answer:
    """What is answered to a GET, with this password if there is one."""
    if password is not None:
        headers["Authorization"] = "Basic " + base64.b64encode(f"anybody:{password}".encode()).decode()
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            return Answer(answer.status, answer.headers, answer.read().decode())
    except HTTPError as e:
        return Answer(e.code, e.headers, e.read().decode())


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    """A sidecar with pages for all tests of a module."""
    with Sidecar(tmp_path_factory.mktemp("pages"), metrics_listen="127.0.0.1:0") as sidecar:
        yield sidecar


@pytest.fixture
def url(shared: Sidecar) -> str:
    """For its pages."""
    return f"http://{address_of(shared)}"


@pytest.fixture
def get(url: str) -> Get:
    """Gets a path of its pages."""
    return lambda path, password=None, **headers: fetch(url + path, password, **headers)


@pytest.fixture
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    BROWSER.check()
    with Browser(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser
