"""docs/guides/client.md: its programs run, its table of settings is the code's."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

from seqdedupe.client import ProducerConfig
from seqdedupe.testing import LAST_RESORT_SECONDS, Sidecar

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "client.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_the_programs_run(sidecar: Sidecar) -> None:
    printed = []
    for program in PROGRAMS:
        assert "127.0.0.1:6660" in program
        program = program.replace("127.0.0.1:6660", sidecar.address)
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=LAST_RESORT_SECONDS
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout.splitlines())
    publish, read, threads = printed
    assert [line.split(" ")[:2] for line in publish] == [["0", "NOT_DUP"], ["1", "NOT_DUP"], ["2", "NOT_DUP"]]
    assert read[0] == "0 payment-service 0 b'one'"
    assert read[3].startswith("read up to ")
    assert threads == ["NOT_DUP", "4 messages"]


def test_the_table_of_settings_is_the_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \|", PAGE, re.MULTILINE)
    assert [(name, float(default)) for name, default in rows] == [
        (item.name, float(str(item.default))) for item in fields(ProducerConfig)
    ]
