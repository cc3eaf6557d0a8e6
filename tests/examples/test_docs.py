"""What docs/guides/broker.md and the README of the example show is what happens."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar
from tests.conftest import StartSidecar
from tests.examples.brokers import ROOT, BrokerProcess

PAGE = ROOT / "docs" / "guides" / "broker.md"
README = ROOT / "examples" / "broker" / "README.md"


def test_the_program_runs(start_sidecar: StartSidecar) -> None:
    sidecar = start_sidecar(log="broker")
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    program = program.replace("127.0.0.1:6660", sidecar.address)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=LAST_RESORT_SECONDS)
    assert done.stdout.splitlines() == [
        "shop 1 NOT_DUP",
        "shop 2 NOT_DUP",
        "shop 2 UNKNOWN",
        "[<Verdict.DUP: 2>, <Verdict.NOT_DUP: 1>]",
        "[<Verdict.NOT_DUP: 1>]",
    ], done.stderr


async def test_the_dialogue(start_sidecar: StartSidecar, tmp_path: Path) -> None:
    sidecar: Sidecar = await asyncio.to_thread(start_sidecar, log="broker")
    broker = BrokerProcess("examples.broker.broker", str(tmp_path / "log"), "--sidecar", sidecar.address)
    try:
        broker.start()
        assert await asyncio.to_thread(broker.attached.acquire, timeout=LAST_RESORT_SECONDS)
        host, _, port = broker.address.rpartition(":")
        dialogues = re.findall(r"^\$ printf '(.*)' \| send\n((?:\d.*\n)+)", README.read_text(), re.MULTILINE)
        assert len(dialogues) == 2
        for said, answered in dialogues:
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(said.replace(r"\n", "\n").encode())
            writer.write_eof()
            assert (await reader.read()).decode() == answered
            writer.close()
        broker.kill()
        show = [sys.executable, "-m", "examples.broker.broker", str(tmp_path / "log"), "--print"]
        shown = (
            await asyncio.to_thread(subprocess.check_output, show, text=True, cwd=ROOT, timeout=LAST_RESORT_SECONDS)
        ).strip()
        assert shown in README.read_text()
        assert len(shown.splitlines()) == 3
    finally:
        broker.close()
