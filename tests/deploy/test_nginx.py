"""The example for nginx, with a real nginx before a real sidecar; and what a proxy that nobody has configured does."""

import asyncio
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from seqdedupe.client import (
    Client,
    Credentials,
    OutcomeUnknownError,
    ProducerConfig,
    UnavailableError,
)
from seqdedupe.testing import Sidecar, reserved_port
from tests.certificates import Authority
from tests.client.helpers import ids_in_log, until
from tests.tiers import NGINX

CONFIGURATION = Path(__file__).parents[2] / "deploy" / "nginx.conf"

NEVER_GIVES_UP = ProducerConfig(max_batch_rows=1, delivery_timeout_seconds=None)

MIB = 1024 * 1024

AS_INSTALLED = """
upstream seqdedupe { server 127.0.0.1:6660; }
server {
    listen 6661 ssl http2;
    ssl_certificate     /etc/nginx/seqdedupe.pem;
    ssl_certificate_key /etc/nginx/seqdedupe.key;
    location / { grpc_pass grpc://seqdedupe; }
}
"""
"""What there is without the example: all of nginx's own limits."""


@pytest.fixture(scope="module")
def program() -> str:
    NGINX.check()
    return NGINX.where("nginx") or ""


@pytest.fixture(scope="module")
def sidecar(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with Sidecar(tmp_path_factory.mktemp("sidecar"), max_topics=1000) as sidecar:
        yield sidecar


class Nginx:
    """One nginx, with a configuration that may be changed."""

    def __init__(self, program: str, folder: Path, target: str) -> None:
        self._program = program
        self._folder = folder
        self._target = target
        self._reserved = reserved_port()
        self.port = self._reserved.getsockname()[1]
        authority = Authority(folder)
        self._issued = authority.issue("localhost", "localhost")
        self.credentials = Credentials(tls_ca_file=authority.ca_file)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"localhost:{self.port}"

    def client(self) -> Client:
        return Client(self.address, self.credentials)

    def configure(self, text: str) -> None:
        """Puts this test's own places into the configuration."""
        for there, here in (
            ("127.0.0.1:6660", self._target),
            ("listen 6661", f"listen 127.0.0.1:{self.port}"),
            ("/etc/nginx/seqdedupe.pem", str(self._issued.certificate_file)),
            ("/etc/nginx/seqdedupe.key", str(self._issued.key_file)),
        ):
            assert text.count(there) == 1, there
            text = text.replace(there, here)
        temporary = "".join(
            f"{kind}_temp_path {self._folder}/{kind};\n"
            for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
        )
        (self._folder / "nginx.conf").write_text(
            f"daemon off; worker_processes 1; pid {self._folder}/pid; error_log {self._folder}/error.log info;\n"
            "worker_shutdown_timeout 1s;\nevents { worker_connections 1024; }\n"
            f"http {{ access_log off;\n{temporary}{text}\n}}\n"
        )

    async def start(self) -> None:
        self._spawn()
        await until(self._listens)

    def _spawn(self) -> None:
        command = [self._program, "-e", f"{self._folder}/error.log", "-c", f"{self._folder}/nginx.conf"]
        self._process = subprocess.Popen(command)

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, (self._folder / "error.log").read_text()
        return (self._folder / "pid").exists() and (self._folder / "pid").read_text().strip() == str(self._process.pid)

    async def restart(self, text: str) -> None:
        self.stop()
        self.configure(text)
        await self.start()

    async def reload(self) -> None:
        """Returns when a new worker has begun; the old one goes on with what is open for a second."""
        assert self._process is not None
        before = self._workers()
        self._process.send_signal(signal.SIGHUP)
        await until(lambda: self._workers() > before)

    def _workers(self) -> int:
        return (self._folder / "error.log").read_text().count("start worker process ")

    def log(self) -> str:
        return (self._folder / "error.log").read_text()

    def stop(self) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
            (self._folder / "pid").unlink(missing_ok=True)
            self._process = None

    def close(self) -> None:
        self.stop()
        self._reserved.close()


@pytest.fixture
async def nginx(program: str, sidecar: Sidecar, tmp_path: Path) -> AsyncIterator[Nginx]:
    nginx = Nginx(program, tmp_path, sidecar.address)

    try:
        nginx.configure(CONFIGURATION.read_text())
        await nginx.start()
        yield nginx
    finally:
        nginx.close()


async def test_a_stream_may_be_as_long_as_it_wants(nginx: Nginx, sidecar: Sidecar, topic: str) -> None:
    async with nginx.client() as client, client.producer(topic, "p", NEVER_GIVES_UP) as producer:
        receipts = [await producer.send(bytes(MIB)) for _ in range(8)]
        receipts.append(await producer.send(bytes(5 * MIB)))
        assert [(await receipt).index for receipt in receipts] == list(range(9))
        assert producer.counters.connections == 1
    assert await ids_in_log(sidecar, topic) == list(range(9))


async def test_the_body_limit_of_a_proxy_costs_connections(nginx: Nginx, sidecar: Sidecar, topic: str) -> None:
    """The control: nginx takes 1 MiB a request, and a request is a stream. What is larger alone is named."""
    await nginx.restart(AS_INSTALLED)
    async with nginx.client() as client:
        producer = client.producer(topic, "p", NEVER_GIVES_UP)
        await producer.open()
        receipts = [await producer.send(bytes(MIB // 4)) for _ in range(20)]
        assert [(await receipt).sequence_id for receipt in receipts] == list(range(20))
        assert producer.counters.connections > 4
        with pytest.raises(OutcomeUnknownError, match=r"sequence IDs 20 to 20, of .* was alone") as caught:
            await (await producer.send(bytes(2 * MIB)))
        assert "client_max_body_size" in caught.value.hint
        await producer.abort()
    assert await ids_in_log(sidecar, topic) == list(range(20))
    assert "too large" in nginx.log()


async def test_a_client_publishes_to_more_topics_than_nginx_allows_streams(nginx: Nginx, topic: str) -> None:
    """For itself nginx allows 128 a connection."""
    await publishes_to(nginx, topic, 150)
    text, found = re.subn("http2_max_concurrent_streams [0-9]+;", "", CONFIGURATION.read_text())
    assert found == 1
    await nginx.restart(text)
    await publishes_to(nginx, topic, 150)


async def publishes_to(nginx: Nginx, topic: str, topics: int) -> None:
    async with nginx.client() as client:
        producers = [client.producer(f"{topic}-{k}", "p", NEVER_GIVES_UP) for k in range(topics)]
        await asyncio.gather(*(producer.open() for producer in producers))
        receipts = [await producer.send(b"") for producer in producers]
        assert len([await receipt for receipt in receipts]) == topics
        await asyncio.gather(*(producer.close() for producer in producers))


async def while_publishing(nginx: Nginx, sidecar: Sidecar, topic: str, trouble: Callable[[], object]) -> None:
    """Publishes and reads meanwhile: nothing is lost, doubled or ended."""
    is_over = asyncio.Event()
    async with nginx.client() as client, client.producer(topic, "p", NEVER_GIVES_UP) as producer:
        await (await producer.send(b""))
        async with client.reader(topic, follow=True) as reader:
            receipts = []
            read: list[int] = []

            async def follow() -> None:
                while True:
                    read.append((await anext(reader)).sequence_id)

            async def publish() -> None:
                while not is_over.is_set():
                    receipt = await producer.send(b"")
                    receipts.append(receipt)
                    await receipt

            tasks = [asyncio.create_task(follow()), asyncio.create_task(publish())]
            try:
                await until(lambda: bool(receipts and read))
                await trouble()  # type: ignore[misc]
                last = len(receipts)
                await until(lambda: len(receipts) > last + 1)
                is_over.set()
                await tasks[1]
                await until(lambda: len(read) == 1 + len(receipts))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    assert read == list(range(len(read)))
    assert await ids_in_log(sidecar, topic) == read


@pytest.mark.parametrize("status", [400, 403, 404, 413, 429, 500, 502, 503])
async def test_a_status_of_the_proxy_ends_nothing(nginx: Nginx, sidecar: Sidecar, topic: str, status: int) -> None:
    async def trouble() -> None:
        text = CONFIGURATION.read_text()
        await nginx.restart(text.replace("location / {", f"location / {{ return {status};"))
        # nginx says nothing of what it answers: another client sees it.
        async with nginx.client() as other:
            for _ in range(3):
                with pytest.raises(UnavailableError):
                    await other.admin.topic(topic)
        await nginx.restart(text)

    await while_publishing(nginx, sidecar, topic, trouble)


async def test_a_reload_and_a_restart_end_nothing(nginx: Nginx, sidecar: Sidecar, topic: str) -> None:
    async def trouble() -> None:
        for _ in range(3):
            await nginx.reload()
        nginx.stop()
        await nginx.start()

    await while_publishing(nginx, sidecar, topic, trouble)


async def test_its_time_outs_end_nothing(nginx: Nginx, sidecar: Sidecar, topic: str) -> None:
    """A second in the place of the example's hour, so that silent streams end."""
    text, found = re.subn(
        r"(client_body|grpc_read|grpc_send)(_timeout +)1h;", r"\g<1>\g<2>1s;", CONFIGURATION.read_text()
    )
    assert found == 3
    await nginx.restart(text)
    async with (
        nginx.client() as client,
        client.producer(topic, "p", NEVER_GIVES_UP) as producer,
        client.reader(topic, follow=True) as reader,
    ):
        await (await producer.send(b""))
        assert (await anext(reader)).sequence_id == 0
        following = asyncio.create_task(anext(reader))
        await until(lambda: producer.counters.connections > 2)
        await (await producer.send(b""))
        assert (await following).sequence_id == 1
    assert await ids_in_log(sidecar, topic) == [0, 1]
    assert "timed out" in nginx.log()


async def test_what_starts_behind_a_wrong_path_names_the_proxy(nginx: Nginx, topic: str) -> None:
    await nginx.restart(CONFIGURATION.read_text().replace("location / {", "location /elsewhere {"))
    async with nginx.client() as client:
        with pytest.raises(UnavailableError, match=r"a proxy on the way.*404") as caught:
            await client.producer(topic, "p").open()
        assert caught.value.reason == "NOT_A_SIDECAR"
