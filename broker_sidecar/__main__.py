"""`python -m broker_sidecar`: the sidecar. Every configuration key is also a flag."""

import argparse
import difflib
import faulthandler
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

_VARIABLE = "GRPC_EXPERIMENTS"
_THE_OLDER_WAY = "-event_engine_client,-event_engine_listener"
"""The older of gRPC's ways to wait for sockets."""

_NEWEST_THAT_KNOWS = (1, 85)
"""The newest version of gRPC that certainly has these names. A later version may not have them, and would report that
on standard error at each start."""


def turn_off_event_engine() -> None:
    """Make the thread that waits for gRPC's events wait for the sockets directly, without a second thread.

    This saves a wake-up of a thread in each direction (`python -m bench one_in_flight steady`). A value that is already
    in the environment is kept. Call this before gRPC is imported.
    """
    major, minor = version("grpcio").split(".")[:2]
    if (int(major), int(minor)) <= _NEWEST_THAT_KNOWS:
        os.environ.setdefault(_VARIABLE, _THE_OLDER_WAY)


# Before the import of gRPC, which some modules below import. It would write a line for each compressed call and each
# failed handshake: any client that can connect could fill a disk.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
turn_off_event_engine()

from broker_sidecar.config import (  # noqa: E402
    KEYS,
    Config,
    flag_of,
    for_dev,
    from_process,
)
from seqdedupe.address import DEFAULT_ADDRESS, SidecarAddress  # noqa: E402
from seqdedupe.errors import EXIT_WRONG, SeqdedupeError, exit_status  # noqa: E402


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # One line, like every error: argparse's usage would put a screen of flags above it.
        self.exit(EXIT_WRONG, f"seqdedupe: {message}{'' if message.endswith('?') else '.'} See {self.prog} --help.\n")


def arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the sidecar's flags."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with keys of the configuration")
    parser.add_argument(
        "--dev",
        action="store_true",
        help="for trying out: temporary data, on loopback, without a token",
    )
    parser.add_argument(
        "--rebuild-store",
        action="store_true",
        help="make new records for logs that have no record in the store",
    )
    parser.add_argument(
        "--give-up-journal",
        action="store_true",
        help="start without the missing or damaged parts of the logs' journal",
    )
    for name, item in KEYS.items():
        about = item.metadata["about"].replace("%", "%%")
        if isinstance(item.default, bool):
            parser.add_argument(
                flag_of(name), dest=name, action=argparse.BooleanOptionalAction, default=None, help=about
            )
        else:
            parser.add_argument(flag_of(name), dest=name, metavar=type(item.default).__name__.upper(), help=about)
    return parser


def main(argv: list[str] | None = None, *, prog: str = "broker_sidecar") -> int:
    """Run the sidecar, and return the exit status."""
    about = "Runs the sidecar. Every key of the configuration is a flag too."
    # The meaning of an abbreviated flag would change, or disappear, when a key is added.
    parser = arguments(_Parser(prog=prog, description=about, allow_abbrev=False))
    found, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [flag_of(name) for name in KEYS]
        # The text after `=` may be a secret.
        typed = unknown[0].partition("=")[0]
        near = [flag for flag in flags if flag.startswith(typed)] or difflib.get_close_matches(typed, flags, 1)
        parser.error(f"there is no {typed}" + (f": do you mean {near[0]}?" if near else ""))
    given = vars(found)
    file, is_dev = given.pop("config"), given.pop("dev")
    repairs = {"rebuild_store": given.pop("rebuild_store"), "gives_up_journal": given.pop("give_up_journal")}
    if is_dev and any(repairs.values()):
        parser.error("--dev begins without data, so there is nothing to repair")
    with ExitStack() as held:
        try:
            config = _dev_config(file, given, held) if is_dev else from_process(file, given)
        except SeqdedupeError as e:
            print(f"seqdedupe: {e} {e.hint}", file=sys.stderr)
            return exit_status(e)
        on_serving = partial(_say_what_next, config.data_directory) if is_dev else None
        return _run(config, held, sys.argv[1:] if argv is None else argv, on_serving, repairs)


def _dev_config(file: Path | None, given: dict[str, Any], held: ExitStack) -> Config:
    """Return the configuration of `--dev`. Its folder is removed when `held` ends, also if SIGTERM arrives before the
    sidecar serves."""
    from broker_sidecar.sockets import check_nobody_listens

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    folder = held.enter_context(TemporaryDirectory(prefix="seqdedupe-dev-", ignore_cleanup_errors=True))
    listen = DEFAULT_ADDRESS
    try:
        check_nobody_listens(SidecarAddress.parse(listen), "listen")
    except SeqdedupeError:
        listen = "127.0.0.1:0"
    return for_dev(file, given, folder, listen)


def _say_what_next(folder: str, address: SidecarAddress) -> None:
    found = shutil.which("seqdedupe")
    command = "seqdedupe" if found else shlex.quote(str(Path(sys.executable).with_name("seqdedupe")))
    at = f"--address {shlex.quote(str(address))}"
    print(
        f"A sidecar for trying out, at {address}. It needs no token. When it ends, it deletes its data in {folder}.\n\n"
        "In another terminal:\n\n"
        f"    printf 'one\\ntwo\\n' | {command} publish - --topic orders --producer shop {at}\n"
        f"    {command} read orders {at}\n",
        flush=True,
    )


def _run(
    config: Config,
    held: ExitStack,
    flags: Sequence[str],
    on_serving: Callable[[SidecarAddress], None] | None,
    repairs: dict[str, bool],
) -> int:
    from broker_sidecar import data_directory, kernels, telemetry, workers
    from broker_sidecar.sockets import check_nobody_listens

    if faulthandler.is_enabled():
        # This lets `seqdedupe.testing` read the stacks without ending the process.
        faulthandler.register(signal.SIGUSR2)
    folder = Path(config.data_directory)
    try:
        data_directory.check_is_no_backup(folder)
        lock = held.enter_context(data_directory.taken(folder))
        count = workers.count_of(config)
        workers.divide(config, count)
        if count > 1:
            return workers.run(config, count, flags, lock)
        for key in ("listen", "also_listen", "metrics_listen", "pulsar_listen"):
            if text := getattr(config, key):
                check_nobody_listens(SidecarAddress.parse(text), key)
    except (SeqdedupeError, OSError) as e:
        return data_directory.ended_by(e, folder)
    beside: kernels.CompilingBeside | None = None
    if kernels.prepare(config.data_directory):
        telemetry.configure(config.log_level, config.log_format)
        # Several workers would each start such a process. And recovery takes far longer with uncompiled code.
        if config.log == "embedded" and not config.shards and not data_directory.has_data(folder):
            # If the process cannot be started, compile first, as if there were data to recover.
            with suppress(OSError):
                beside = kernels.CompilingBeside(config.data_directory)
        if beside is None:
            kernels.compile_first(config.data_directory)
    from broker_sidecar.server import run

    if beside is not None:
        held.callback(beside.stop)
        beside.watch()
    return run(config, lock, on_serving, **repairs)


if __name__ == "__main__":
    sys.exit(main())
