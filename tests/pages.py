"""Code blocks of pages, run as a reader runs them: commands in one terminal, programs in one session of Python.

The word after three backticks says what becomes of a block. All blocks of a page run in their order, in one folder:

    console    commands after `$ `, each with the output that it has; `…` there stands for anything
    sh         commands that have to succeed, no matter what they print
    python     statements, in one namespace for the page
    toml       a configuration of the sidecar, which must be valid
    text       no code: drawings, pieces of files, what a program prints
    ini, sql   pieces of files, what is in a database
    go         programs, which a test of clients/go runs
    java, xml  the like of Java, which nothing runs

A second word, one of EXCEPTIONS, says why a block does not run.
"""

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from broker_sidecar.config import load

COMMAND = str(Path(sys.executable).with_name("seqdedupe"))
DEFAULT_ADDRESS = "127.0.0.1:6660"
PLAIN = {"text", "ini", "sql", "go", "java", "xml"}
EXCEPTIONS = {
    "elsewhere": "needs another machine, root, a container, a Pulsar cluster, or files of an operator",
    "fragment": "a piece of a program, whose language, framework or rest is not there",
    "sample": "prints what is there when something has gone wrong; tests of the command have it",
}
_NOTICE = re.compile(r"^bash: line \d+: +\d+ Killed .*\n", re.MULTILINE)
"""What the shell itself says of a job that has ended."""
SHELLS_OWN = set("|<>$&;*`(){}\n")


class Block(NamedTuple):
    """A fenced block: its line in the page, its language, its mark or nothing, its text."""

    line: int
    language: str
    mark: str
    text: str


def blocks(page: str | Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page (its path, or its text), of one language if that is given."""
    text = page.read_text() if isinstance(page, Path) else page
    found = [
        Block(text[: match.start()].count("\n") + 1, match[1].partition(" ")[0], match[1].partition(" ")[2], match[2])
        for match in re.finditer(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    ]
    return [block for block in found if language in (None, block.language)]


def runnable(page: str | Path) -> list[Block]:
    """The blocks that run."""
    return [block for block in blocks(page) if block.language not in PLAIN and block.mark not in EXCEPTIONS]


def programs(page: str | Path) -> list[str]:
    """The texts of the blocks in Python."""
    return [block.text for block in blocks(page, "python")]


def commands(block: str) -> list[tuple[str, str]]:
    """Each command of a console block with the output that it shows. A line that ends with a backslash goes on."""
    return re.findall(r"^\$ ((?:.*\\\n)*.*)\n((?:(?!\$ ).*\n)*)", block, re.MULTILINE)


def matches(shown: str, found: str) -> bool:
    """Whether an output is the one that a page shows: `…` stands for anything."""
    return re.fullmatch(".*".join(map(re.escape, shown.split("…"))), found, re.DOTALL) is not None


class Terminal:
    """A shell that runs one command after the other. Variables and jobs stay until it is closed."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._shell = subprocess.Popen(
            ["bash"],
            cwd=folder,
            env={**environment, "PATH": f"{Path(COMMAND).parent}:{environment['PATH']}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def close(self) -> None:
        os.killpg(self._shell.pid, signal.SIGKILL)
        self._shell.communicate()

    def run(self, command: str) -> tuple[str, int]:
        """What it prints on both streams, and its status."""
        if command.startswith("seqdedupe ") and not set(command) & SHELLS_OWN:
            # By itself, and not by a shell, the command starts warm.
            words, place = [COMMAND, *shlex.split(command)[1:]], self.place()
            done = subprocess.run(words, **place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
            return done.stdout.decode(), done.returncode
        return self._ask(command)

    def place(self) -> dict[str, Any]:
        """The shell's folder and environment, as keywords of Popen."""
        with tempfile.NamedTemporaryFile() as file:
            self._ask(f"(pwd; env -0) > {file.name}")
            folder, _, variables = Path(file.name).read_text().partition("\n")
        return {"cwd": folder, "env": dict(one.split("=", 1) for one in variables.split("\0") if "=" in one)}

    def _ask(self, command: str) -> tuple[str, int]:
        assert self._shell.stdin is not None
        assert self._shell.stdout is not None
        mark = f"end of {id(command)}"
        self._shell.stdin.write(f"{{ {command}\n}} < /dev/null 2>&1\nprintf '{mark} %d\\n' $?\n".encode())
        self._shell.stdin.flush()
        printed = ""
        while mark not in printed:
            line = self._shell.stdout.readline().decode()
            assert line, f"the shell has ended: {printed}"
            printed += line
        output, _, status = printed.partition(mark)
        return _NOTICE.sub("", output), int(status)


class Reader:
    """Somebody who does all that a page shows, in one folder.

    The address stands for the default one of a sidecar, and the folder for /var/lib in programs.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], address: str) -> None:
        self._address = address
        self._folder = folder
        self._terminal = Terminal(folder, environment)
        self._names: dict[str, Any] = {"__name__": "page"}

    def close(self) -> None:
        self._terminal.close()

    def follow(self, page: str | Path) -> int:
        """Runs the blocks of a page; returns how many ran."""
        for block in runnable(page):
            self._run(block)
        return len(runnable(page))

    def _run(self, block: Block) -> None:
        text = block.text.replace(DEFAULT_ADDRESS, self._address).replace("/var/lib", str(self._folder))
        if block.language == "python":
            with _at(**self._terminal.place()):
                exec(compile("\n" * block.line + text, "page", "exec"), self._names)
        elif block.language == "console":
            for command, shown in commands(text):
                output, status = self._terminal.run(command)
                output += f"(exit status {status})\n" if status else ""
                assert matches(shown, output), f"line {block.line}: $ {command}\n{output}\nshould be\n{shown}"
        elif block.language == "sh":
            output, status = self._terminal.run(f"set -e\n{text}set +e")
            assert status == 0, f"line {block.line}: {output}"
        else:
            assert block.language == "toml", f"line {block.line}: nobody knows how {block.language!r} is run"
            file = self._folder / f"line-{block.line}.toml"
            file.write_text(block.text)
            load(file, {"SEQDEDUPE_DATA_DIRECTORY": "data"}, {})


@contextmanager
def _at(cwd: str, env: Mapping[str, str]) -> Iterator[None]:
    """This process in that folder, with that environment."""
    folder, environment = os.getcwd(), dict(os.environ)
    os.chdir(cwd)
    os.environ.update({name: value for name, value in env.items() if name != "_"})
    try:
        yield
    finally:
        os.chdir(folder)
        os.environ.clear()
        os.environ.update(environment)
