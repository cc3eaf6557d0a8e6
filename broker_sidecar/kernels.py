"""The folder that keeps compiled kernels from one start to the next, and the steps of a start without compiled kernels.

`seqdedupe compile` compiles once for all users of an installation (`compile_for_installation`). A start copies the
kernels from the installation's folder.

numba unpickles the files of this folder. So a user who can write to the folder, or replace it, can run code in this
process. Compiling takes up to a minute. Without the folder, every restart after a crash would need this minute. A first
start does not wait for the compilation: `CompilingBeside` lets a second process compile, which runs this module's
`main`.
"""

import hashlib
import importlib
import logging
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numba
from llvmlite import binding

import seqdedupe
from seqdedupe.format import jit

logger = logging.getLogger("seqdedupe.server")

_COMPLETE = "complete"
"""A file next to the kernels: all that the sidecar needs was compiled once. An interrupted start does not write it."""

_NEEDS_ALL = ("broker_sidecar.server", "broker_sidecar.door.door")
"""The modules that import every module with kernels for a sidecar, also for a sidecar with a door. Spark jobs use this
file, but nothing of those modules."""

_NICENESS = 10
"""The niceness of the process that compiles: the sidecar serves meanwhile."""

_PROGRESS_SECONDS = 5.0
"""The time between progress lines of a start that compiles first."""

COMPILE_LIMIT_SECONDS = 1800.0
"""If a process that compiles next to a sidecar runs for this time, it hangs and is killed. Usually compiling takes a
minute."""

_STOP_SECONDS = 5.0
"""When the sidecar stops: the maximum wait for a killed process, and for the thread that loads its kernels."""

MAX_LINKS = 40
"""The maximum number of symbolic links on the path to a folder, the same as the operating system's limit."""


def prepare(data_directory: str = "") -> bool:
    """Choose the folder for kernels. Return whether the kernels will be compiled now. Call this before importing any
    kernels.

    The folder is in the user's cache folder. This requires that the cache folder and all its parent folders belong to
    this user or root, and that no other user can write to these folders. Otherwise the folder is in the data directory,
    if there is one. If neither is writable, there is no folder.
    """
    folder = _folder(data_directory)
    if folder is None:
        return True
    if not (folder / _COMPLETE).exists():
        _copy_installed(folder)
    jit.keep_compiled(folder)
    return not (folder / _COMPLETE).exists()


def compile_first(data_directory: str = "") -> None:
    """Compile all kernels that a sidecar needs. Print why the start takes long, and print the progress.

    If the compilation fails, kernels stay plain functions, and the log contains the reason.
    """
    with _Progress() as progress:
        progress.kernels = _import_all()
        if _compile_now():
            compiled(data_directory)


def compile_for_installation() -> Path:
    """Compile everything that a sidecar needs, for all users of this installation. Return the folder that contains the
    kernels.

    The folder is in the installation and readable for everyone. If this user cannot write to that folder, the kernels
    are in the user's cache folder. If the folder is complete, return at once. Raises PermissionError if neither is
    writable, OSError, and numba's errors.
    """
    folder = _installed_folder()
    is_for_all = _made(folder.parents[1], folder.parent.name, folder.name) and _is_closed(folder)
    if not is_for_all:
        if (own := _folder("")) is None:
            raise PermissionError(
                f"compiled kernels cannot be kept: neither {folder} nor a cache folder can be written"
            )
        folder = own
    if not (folder / _COMPLETE).exists():
        jit.keep_compiled(folder)
        with _Progress() as progress:
            progress.kernels = _import_all()
            jit.compile_now()
        (folder / _COMPLETE).touch()
    if is_for_all:
        for place in (folder.parent, folder, *folder.rglob("*")):
            place.chmod(0o755 if place.is_dir() else 0o644)
    return folder


def _import_all() -> int:
    """Import all kernels as plain functions. Return the number of kernels."""
    jit.compile_later()
    for name in _NEEDS_ALL:
        importlib.import_module(name)
    return jit.plain_kernels()


def _compile_now(goes_on: Callable[[], bool] = lambda: True) -> bool:
    """Compile the kernels. Return whether the compilation succeeded. After a failure the log contains the reason."""
    kernels = jit.plain_kernels()
    try:
        jit.compile_now(goes_on)
    except Exception as e:  # noqa: BLE001 (numba and LLVM raise anything, and plain functions give the same)
        logger.error(
            "%d of %d kernels cannot be compiled (%s: %s): the sidecar uses plain functions, which take up to a "
            "hundred times as long",
            jit.plain_kernels(),
            kernels,
            type(e).__name__,
            " ".join(str(e).split()),
        )
        return False
    return True


class _Progress:
    """The report on standard error that this process compiles, and of its progress every _PROGRESS_SECONDS."""

    def __init__(self) -> None:
        self.kernels = 0
        """The number of kernels to compile; 0 while it is not known."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._say, name="seqdedupe-progress", daemon=True)

    def __enter__(self) -> Self:
        _tell("seqdedupe: compiling for this machine, which can take a minute")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _say(self) -> None:
        began = time.monotonic()
        while not self._ended.wait(_PROGRESS_SECONDS):
            how_far = f"{self.kernels - jit.plain_kernels()} of {self.kernels} kernels" if self.kernels else "loading"
            _tell(f"seqdedupe: compiling for this machine: {how_far}, {time.monotonic() - began:.0f} s")


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compiled(data_directory: str = "") -> None:
    """Record that later starts need not compile. Call this after `prepare`, when all modules of the sidecar are
    imported."""
    folder = _folder(data_directory)
    # On a full disk not all kernels are stored. The sidecar starts nevertheless.
    with suppress(OSError):
        if folder is not None:
            (folder / _COMPLETE).touch()


class CompilingBeside:
    """A second process that compiles the kernels into the folder chosen by `prepare`. Until the second process has
    finished, this process runs the kernels as plain functions.

    Create this object before importing any kernels, then call `watch`, and call `stop` before the process ends. Raises
    OSError if there is no such folder, or if no process can be started. In these cases, nothing has changed.

    The results are always the same. Plain functions take up to a hundred times as long, and block the event loop, so
    other clients notice a large frame. If the second process fails, this process continues to use the plain functions,
    and the next start compiles first.
    """

    def __init__(self, data_directory: str) -> None:
        if (folder := _folder(data_directory)) is None:
            raise FileNotFoundError("there is no folder for compiled kernels")
        self._complete = folder / _COMPLETE
        # Do not import from the current folder: other users may be able to write there. The process ends when its
        # standard input does, so it does not outlive this one. Ctrl-C reaches only this process.
        path = "-I" if sys.flags.isolated else "-P"
        command = [sys.executable, path, "-m", "broker_sidecar.kernels", data_directory]
        pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=nothing, stderr=pipe, text=True, errors="replace", start_new_session=True
        )
        jit.compile_later()
        _tell("seqdedupe: compiling for this machine, which can take a minute; until then the sidecar serves slowly")
        self._is_stopped = False
        self._took_too_long = False
        self._thread = threading.Thread(target=self._take_over, name="seqdedupe-compiling", daemon=True)

    def watch(self) -> None:
        """Load the compiled kernels when they are complete, and log the result. Call this after all imports of
        kernels."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the compilation, finished or not. Returns soon."""
        self._is_stopped = True
        self._process.kill()
        if self._thread.ident is not None:
            self._thread.join(_STOP_SECONDS)

    def _take_over(self) -> None:
        limit = threading.Timer(COMPILE_LIMIT_SECONDS, self._end_what_hangs)
        limit.daemon = True
        limit.start()
        with self._process as process:
            said = process.stderr.read() if process.stderr else ""
        limit.cancel()
        # Check the folder, not the exit status: another installation may have compiled for itself.
        is_complete = self._complete.exists()
        if is_complete and not _compile_now(lambda: not self._is_stopped):
            return
        if self._is_stopped:
            return
        if is_complete:
            logger.info("compiled for this machine: the sidecar has its full speed now")
        elif process.returncode == -signal.SIGTERM:
            logger.info(
                "compiling for this machine was ended (SIGTERM): the sidecar serves slowly; the next start compiles "
                "before it serves"
            )
        elif self._took_too_long:
            logger.warning(
                "compiling for this machine was ended: it took more than %g s; the sidecar serves slowly; the next "
                "start compiles before it serves",
                COMPILE_LIMIT_SECONDS,
            )
        else:
            logger.warning(
                "compiling for this machine has failed (status %d: %s): the sidecar serves slowly; the next start "
                "compiles before it serves",
                process.returncode,
                said.strip().rpartition("\n")[2],
            )

    def _end_what_hangs(self) -> None:
        self._took_too_long = True
        self._process.kill()


def main() -> None:
    """Compile the kernels for a sidecar with this data directory (`python -m broker_sidecar.kernels DIRECTORY`)."""
    threading.Thread(target=_end_with_input, daemon=True).start()
    # Without permission to change the niceness, the process keeps its normal niceness.
    with suppress(OSError):
        os.nice(_NICENESS)
    data_directory = sys.argv[1]
    prepare(data_directory)
    for name in _NEEDS_ALL:
        importlib.import_module(name)
    compiled(data_directory)


def _end_with_input() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def _folder(data_directory: str) -> Path | None:
    name = _name()
    home = _cache_home()
    if home is not None and _made(home, "seqdedupe", name) and is_ours_alone(home / "seqdedupe" / name):
        return home / "seqdedupe" / name
    # A user who can write to the data directory has the messages in any case, so the folders above it are not checked.
    if data_directory and _made(Path(data_directory), "kernels", name):
        kernels = Path(data_directory, "kernels")
        if _is_closed(kernels / name):
            return kernels / name
    return None


def _installed_folder() -> Path:
    return Path(sys.prefix, "lib", "seqdedupe-kernels", _name())


def _copy_installed(folder: Path) -> None:
    """Copy the kernels that `compile_for_installation` has compiled, because numba only uses kernels in a folder that
    it can write to."""
    installed = _installed_folder()
    # A user who can write to the installation has the code in any case, so the folders above it are not checked.
    with suppress(OSError):
        if not (installed / _COMPLETE).exists() or not _is_closed(installed):
            return
        for source in sorted(installed.rglob("*.nb?")):
            target = folder / source.relative_to(installed)
            target.parent.mkdir(mode=0o700, exist_ok=True)
            # Another start may copy, or read, at the same time.
            unfinished = target.with_name(f"{target.name}.{os.getpid()}")
            unfinished.write_bytes(source.read_bytes())
            unfinished.replace(target)
        (folder / _COMPLETE).touch()


def _is_closed(kernels: Path) -> bool:
    """Return whether only this user and root can write to this folder of kernels, and to its parent folder."""
    return all(_is_safe(place) and not place.is_symlink() for place in (kernels.parent, kernels))


def fits() -> str:
    """Return a text that names the CPU and the versions for which compiled kernels of this process are valid."""
    python = ".".join(map(str, sys.version_info[:2]))
    return f"{_cpu()[0]}, seqdedupe {version('seqdedupe')}, numba {version('numba')}, Python {python}"


def _cpu() -> tuple[str, str]:
    """Return the name and the features of the CPU that numba compiles for."""
    config: Any = numba.config
    name = config.CPU_NAME or binding.get_host_cpu_name()
    features = config.CPU_FEATURES
    return name, binding.get_host_cpu_features().flatten() if features is None else features


def _name() -> str:
    """Return the folder's name. The name covers all conditions under which numba loads a kernel from the folder.
    Otherwise a start would compile without a message."""
    package = Path(seqdedupe.__file__).parent
    parts = (version("numba"), sys.implementation.cache_tag, str(package), *_cpu())
    found = hashlib.sha256("\0".join(map(str, parts)).encode())
    # If a kernel changes that a kernel of another file calls, numba alone would not notice.
    for file in [*sorted(package.glob("format/*.py")), *sorted(package.glob("core/*.py")), package / "limits.py"]:
        found.update(file.read_bytes())
    return f"kernels-{found.hexdigest()[:16]}"


def _cache_home() -> Path | None:
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return home if home.is_absolute() else None


def _made(home: Path, *names: str) -> bool:
    """Make `home` and these nested folders if they do not exist. Return whether the innermost folder is writable."""
    last = home.joinpath(*names)
    try:
        for folder in (*reversed(home.parents), home, *(home.joinpath(*names[: i + 1]) for i in range(len(names)))):
            if not folder.is_dir():
                folder.mkdir(mode=0o700)
    except OSError:
        return False
    return os.access(last, os.W_OK | os.X_OK)


def is_ours_alone(path: Path) -> bool:
    """Return whether only this user and root can change the file at this path, or any folder on the path."""
    try:
        return all(_is_safe(place) for place in _steps(path))
    except OSError:
        return False


def _is_safe(place: Path) -> bool:
    found = place.lstat()
    if found.st_uid not in (0, os.geteuid()):
        return False
    # For a symbolic link, only the owner is checked. In a sticky folder, other users cannot replace our files.
    others_write = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
    return stat.S_ISLNK(found.st_mode) or not others_write


def _steps(path: Path) -> Iterator[Path]:
    """Yield every folder and symbolic link on the way to a path, and the file at the path itself."""
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
