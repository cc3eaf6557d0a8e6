"""The clients' programs that are compiled. `python -m tests.client_conformance.programs` builds them if it can."""

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from pulsar_broker.quick import COMPILER
from tests.tiers import GO, JDK, ROOT, Service

_BRIEF_JAVA = (COMPILER, "-XX:+UseSerialGC")
"""For JVMs that live for seconds: with them Maven needs half the time of a processor."""


class Compiled(NamedTuple):
    """A program, and how a compiler makes it. The commands run in the client's folder."""

    service: Service
    """The compiler, whose absence skips the tests."""
    folder: Path
    sources: Sequence[Path]
    """Files and folders of which a change has the program built again."""
    fetch: Sequence[str]
    """The command that brings what the client depends on. If it fails, the tests are skipped as without a compiler."""
    build: Sequence[str]
    made: Path
    """A file without which the program is not built. The record of its sources stands next to it."""

    def ensure(self) -> Path:
        """Build the program unless it is there, made of these sources, and return `made`.

        Of several processes one builds, and the others wait. Raises CalledProcessError if the sources do not compile.
        """
        self.service.check()
        self.made.parent.mkdir(parents=True, exist_ok=True)
        with self.made.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            record, digest = self.made.with_suffix(".sources"), self._digest()
            if not (self.made.exists() and record.exists() and record.read_text() == digest):
                record.unlink(missing_ok=True)
                if self._run(self.fetch).returncode:
                    self.service.missing()
                self._run(self.build).check_returncode()
                record.write_text(digest)
        return self.made

    def _digest(self) -> str:
        digest = hashlib.sha256(repr((self.fetch, self.build)).encode())
        for source in self.sources:
            for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
                if path.is_file():
                    digest.update(f"{path}\0".encode() + hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def _run(self, command: Sequence[str]) -> subprocess.CompletedProcess[bytes]:
        program = self.service.where(command[0]) or command[0]
        environment = {"MAVEN_OPTS": " ".join(_BRIEF_JAVA)} | os.environ
        return subprocess.run([program, *command[1:]], cwd=self.folder, env=environment, check=False)


_GO, _JAVA = ROOT / "clients" / "go", ROOT / "clients" / "java"
_GO_PROGRAM, _JAVA_FOLDER = (ROOT / "build" / "conformance" / language for language in ("go", "java"))

GO_CLIENT = Compiled(
    GO,
    _GO,
    [_GO],
    ["go", "mod", "download"],
    ["go", "build", "-o", str(_GO_PROGRAM), "./cmd/conformance"],
    _GO_PROGRAM,
)

# The folder is separate, because `make java-client` or `mvn clean` may run at the same time. The class path is next to
# the classes: who removes the classes also removes it. The first command runs all plugins of the second one, but
# compiles no class. So the second one needs no network. `dependency:go-offline` does not fetch protoc, nor all that
# plugins need.
_MAVEN = ["mvn", "-B", "-q", f"-Dbuild.folder={_JAVA_FOLDER}"]
JAVA_CLIENT = Compiled(
    JDK,
    _JAVA,
    [_JAVA / "pom.xml", _JAVA / "src", ROOT / "proto" / "seqdedupe"],
    [
        *_MAVEN,
        "-Dmaven.main.skip",
        "-Dmaven.test.skip",
        f"-Dmdep.outputFile={_JAVA_FOLDER / 'class-path'}",
        "test-compile",
        "dependency:build-classpath",
    ],
    [*_MAVEN, "--offline", "test-compile"],
    _JAVA_FOLDER / "class-path",
)


def go_command() -> list[str]:
    """The command of the Go client's program, which is built if need be."""
    return [str(GO_CLIENT.ensure())]


def java_command() -> list[str]:
    """The command of the Java client's program, which is built if need be."""
    class_path = JAVA_CLIENT.ensure().read_text()
    path = ":".join([f"{_JAVA_FOLDER / 'classes'}", f"{_JAVA_FOLDER / 'test-classes'}", class_path])
    return ["java", *_BRIEF_JAVA, "-cp", path, "dev.seqdedupe.client.ConformanceProgram"]


if __name__ == "__main__":
    for command in (go_command, java_command):
        try:
            command()
        except pytest.skip.Exception as e:
            print(f"Its tests will be skipped: {e}")
