"""Where compiled kernels are kept from one start to the next, and what a start does while there are none.

numba unpickles what it finds there, so whoever can write to that folder, or put another one in its place, runs code in
this process. Compiling takes up to a minute, which every restart after a crash would pay. A first start does not wait
for it: `CompilingBeside` has another process compile, which is this module's `main`.
"""

import hashlib
import importlib
import logging
import os
import stat
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import seqdedupe
from seqdedupe.format import jit

logger = logging.getLogger("seqdedupe.server")

_COMPLETE = "complete"
"""A file beside what is kept: all that the sidecar needs was compiled once. A first start may have been broken off."""

_NEEDS_ALL = "broker_sidecar.server"
"""Imports every module that has kernels of a sidecar's. Spark jobs use this file, and nothing of that one."""

_NICENESS = 10
"""Of the process that compiles: the sidecar serves meanwhile."""

_STOP_SECONDS = 5.0
"""So long a stop waits at most for a process that was killed, and for what takes over."""

MAX_LINKS = 40
"""Symbolic links on the way to a folder, as for the kernel."""


def prepare(data_directory: str = "") -> bool:
    """To be called before anything that has kernels is imported. Returns whether they will be compiled now.

    They are kept in the user's cache folder if it and all folders above it belong to us (or root) and nobody else can
    write there; otherwise in the data directory, if one is given; if neither can be written, nowhere.
    """
    folder = _folder(data_directory)
    if folder is None:
        return True
    jit.keep_compiled(folder)
    return not (folder / _COMPLETE).exists()


def compile_first(data_directory: str = "") -> None:
    """Compiles all that a sidecar needs, and says why nothing else happens for a while."""
    say_compiling()
    importlib.import_module(_NEEDS_ALL)
    compiled(data_directory)


def say_compiling() -> None:
    """Why nothing else happens for a while."""
    print("seqdedupe: compiling for this machine, which can take a minute", file=sys.stderr, flush=True)


def compiled(data_directory: str = "") -> None:
    """To be called after `prepare`, once all of the sidecar is imported: later starts need not compile."""
    folder = _folder(data_directory)
    # A full disk keeps less, and is no reason not to start.
    with suppress(OSError):
        if folder is not None:
            (folder / _COMPLETE).touch()


class CompilingBeside:
    """Has another process fill the folder that `prepare` has chosen, with this one's kernels as plain functions until
    that is done. To be made before anything that has kernels is imported; then `watch` it, and stop it before the
    process ends. Raises OSError if there is no such folder, or no process can be started: nothing has happened then.

    Results are the same all the while. Plain functions take up to a hundred times as long, and hold the event loop: a
    large frame is felt by others. If the other process fails, kernels stay plain: the next start compiles first.
    """

    def __init__(self, data_directory: str) -> None:
        if (folder := _folder(data_directory)) is None:
            raise FileNotFoundError("there is nowhere to keep kernels")
        self._complete = folder / _COMPLETE
        # Not from the folder that it is started in: who can write there may not be who runs a sidecar. It ends when
        # its standard input does, so it does not outlive this process. Ctrl-C is for this one alone.
        path = "-I" if sys.flags.isolated else "-P"
        command = [sys.executable, path, "-m", "broker_sidecar.kernels", data_directory]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=nothing, stderr=pipe, text=True, errors="replace", start_new_session=True
        )
        jit.compile_later()
        print(
            "seqdedupe: compiling for this machine, which can take a minute; until then the sidecar serves, slowly",
            file=sys.stderr,
            flush=True,
        )
        self._is_stopped = False
        self._thread = threading.Thread(target=self._take_over, name="seqdedupe-compiling", daemon=True)

    def watch(self) -> None:
        """To be called when all that has kernels is imported: takes over what was compiled, and logs how it ends."""
        self._thread.start()

    def stop(self) -> None:
        """Returns soon, whether or not it is done."""
        self._is_stopped = True
        self._process.kill()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)

    def _take_over(self) -> None:
        with self._process as process:
            said = process.stderr.read() if process.stderr else ""
        # Not what its status says: another installation may have compiled for itself.
        if is_complete := self._complete.exists():
            jit.compile_now(lambda: not self._is_stopped)
        if self._is_stopped:
            return
        if is_complete:
            logger.info("compiled for this machine: the sidecar is as fast now as it can be")
        else:
            logger.warning(
                "compiling for this machine has failed (status %d: %s): the sidecar goes on, slowly; the next start "
                "compiles before it serves",
                process.returncode,
                said.strip().rpartition("\n")[2],
            )


def main() -> None:
    """Compiles what a sidecar with this data directory needs (`python -m broker_sidecar.kernels DIRECTORY`)."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    # Where it may not be nice to others, it is not.
    with suppress(OSError):
        os.nice(_NICENESS)
    data_directory = sys.argv[1]
    prepare(data_directory)
    importlib.import_module(_NEEDS_ALL)
    compiled(data_directory)


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _folder(data_directory: str) -> Path | None:
    name = f"kernels-{_sources_hash()}"
    home = _cache_home()
    if home is not None and _made(home, "seqdedupe", name) and is_ours_alone(home / "seqdedupe" / name):
        return home / "seqdedupe" / name
    # Whoever can write to the data directory has the messages in any case: its own place is not looked at.
    if data_directory and _made(Path(data_directory), "kernels", name):
        kernels = Path(data_directory, "kernels")
        if all(_is_safe(place) and not place.is_symlink() for place in (kernels, kernels / name)):
            return kernels / name
    return None


def _sources_hash() -> str:
    # numba alone would not notice that a kernel which another file's kernel calls has changed.
    package = Path(seqdedupe.__file__).parent
    sources = hashlib.sha256(version("numba").encode())
    for file in [*sorted(package.glob("format/*.py")), *sorted(package.glob("core/*.py")), package / "limits.py"]:
        sources.update(file.read_bytes())
    return sources.hexdigest()[:16]


def _cache_home() -> Path | None:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return home if home.is_absolute() else None


def _made(home: Path, *names: str) -> bool:
    """Makes these folders in each other, and `home`, where they are not there yet; whether the last can be written."""
    last = home.joinpath(*names)
    try:
        for folder in (*reversed(home.parents), home, *(home.joinpath(*names[: i + 1]) for i in range(len(names)))):
            if not folder.is_dir():
                folder.mkdir(mode=0o700)
    except OSError:
        return False
    return os.access(last, os.W_OK | os.X_OK)


def is_ours_alone(path: Path) -> bool:
    """Whether nobody but us and root can change what stands at this path, or what the path leads to."""
    try:
        return all(_is_safe(place) for place in _steps(path))
    except OSError:
        return False


def _is_safe(place: Path) -> bool:
    found = place.lstat()
    if found.st_uid not in (0, os.geteuid()):
        return False
    # Of a link only the owner counts. In a sticky folder nobody can put something else in the place of what is ours.
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    return stat.S_ISLNK(found.st_mode) or not others_write


def _steps(path: Path) -> Iterator[Path]:
    """Every folder and every symbolic link that is passed on the way to a path, and what stands at its end."""
    at = Path("/")
    yield at
    left = deque(Path(os.path.abspath(path)).parts[1:])
    links = 0
    while left:
        part = left.popleft()
        if part == "..":
            at = at.parent
            continue
        yield at / part
        if not (at / part).is_symlink():
            at = at / part
            continue
        links += 1
        if links > MAX_LINKS:
            raise OSError(f"too many links on the way to {path}")
        target = (at / part).readlink()
        if target.is_absolute():
            at = Path("/")
        left.extendleft(reversed([p for p in target.parts if p != "/"]))


if __name__ == "__main__":
    main()
