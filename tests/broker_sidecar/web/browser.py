"""A real browser without a screen: Chromium, by its driver's own protocol (WebDriver), which is JSON over HTTP."""

import json
import subprocess
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self
from urllib.error import HTTPError, URLError

from seqdedupe.testing import LAST_RESORT_SECONDS, reserved_port

TIMEOUT_SECONDS = LAST_RESORT_SECONDS
POLL_SECONDS = 0.05

_FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element, as the protocol has it."""


class Browser:
    """Chromium for the length of a block, with its own profile that goes with it."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._port = reserved_port()
        port = self._port.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._flags = [*_FLAGS, f"--user-data-dir={folder}", *flags]
        self._driver = subprocess.Popen(["chromedriver", f"--port={port}"], stdout=subprocess.DEVNULL)

    def __enter__(self) -> Self:
        options = {"goog:chromeOptions": {"args": self._flags}}
        wait_for(self._is_ready)
        answer = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        self._url += f"/session/{answer['sessionId']}"
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", "")
        finally:
            self._driver.terminate()
            self._driver.wait(TIMEOUT_SECONDS)
            self._port.close()

    def _is_ready(self) -> bool:
        try:
            return bool(self._ask("GET", "/status")["ready"])
        except (URLError, ConnectionError):
            return False

    def _ask(self, method: str, path: str, content: object = None) -> Any:
        body = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(self._url + path, body, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
                return json.load(answer)["value"]
        except HTTPError as e:
            raise AssertionError(json.load(e)["value"]["message"]) from e

    def open(self, url: str) -> None:
        """Returns when the page has loaded."""
        self._ask("POST", "/url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script in the page returns. `arguments[k]` are given to it."""
        return self._ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def command(self, name: str, **parameters: Any) -> Any:
        """A command of Chromium's own protocol."""
        return self._ask("POST", "/goog/cdp/execute", {"cmd": name, "params": parameters})

    def _find(self, selector: str) -> str:
        element = self._ask("POST", "/element", {"using": "css selector", "value": selector})
        return str(element[_ELEMENT])

    def click(self, selector: str) -> None:
        """Clicks the first such element where a person would, which must be visible."""
        self._ask("POST", f"/element/{self._find(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._ask("POST", f"/element/{self._find(selector)}/value", {"text": text})

    def texts(self, selector: str) -> list[str]:
        """What is to be read in such elements."""
        found: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText.trim())", selector
        )
        return found

    def be(self, width: int, height: int, scheme: str) -> None:
        """A screen of this size, for somebody who prefers this scheme of colours (`light`, `dark`)."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.command("Emulation.setDeviceMetricsOverride", **size)
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def problems(self) -> list[str]:
        """What the page's console has told since this was asked last: errors, refused scripts."""
        entries = self._ask("POST", "/se/log", {"type": "browser"})
        return [f"{entry['level']}: {entry['message']}" for entry in entries]


def wait_for(condition: Callable[[], Any]) -> Any:
    """What the condition returns as soon as that is true."""
    until = time.monotonic() + TIMEOUT_SECONDS
    while not (found := condition()):
        assert time.monotonic() < until, "what was waited for did not come"
        time.sleep(POLL_SECONDS)
    return found
