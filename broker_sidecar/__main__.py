"""`python -m broker_sidecar`: the sidecar. Every configuration key is also a flag.

Begin with `main`. `_run` contains the steps of a start. `find_problems` finds the problems that these steps would
refuse. Most imports are in functions. So a start that is refused does not wait for the imports, and the folder for
compiled kernels is chosen before kernels are imported.
"""

import argparse
import difflib
import errno
import faulthandler
import importlib.util
import os
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, NoReturn

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


# Set this before the import of gRPC, which some modules below import. Otherwise gRPC would write a line for each
# compressed call and each failed handshake, so any client that can connect could fill a disk.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
turn_off_event_engine()

from broker_sidecar.config import (  # noqa: E402
    KEYS,
    LISTENING,
    Config,
    examine,
    flag_of,
    for_dev,
    from_process,
)
from seqdedupe.address import DEFAULT_ADDRESS, SidecarAddress, cannot_listen  # noqa: E402
from seqdedupe.errors import EXIT_WRONG, INSTALL_HINT, SeqdedupeError, error, exit_status  # noqa: E402
from seqdedupe.files import in_use, owner_of  # noqa: E402


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        # Print one line, like every error. argparse's usage would print a screen of flags above the line.
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
    """Return the configuration of `--dev`. The data folder is removed when `held` ends, even if SIGTERM arrives before
    the sidecar serves."""
    from broker_sidecar.connections import check_nobody_listens

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
    from broker_sidecar.connections import check_nobody_listens

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
        for key in LISTENING:
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


# -- All problems for which a start would refuse a configuration, found without a start. The check locks, creates and
# writes nothing.
#
# `config.py` checks the keys. The functions here check the directories, files and addresses that the keys name. A
# problem is only a warning if it may not exist for the sidecar's own user, or if a running sidecar causes it.


class Problem(NamedTuple):
    """A problem, and whether it would end a start."""

    error: SeqdedupeError
    ends_start: bool = True


def find_problems(file: Path | None, environment: Mapping[str, str]) -> list[Problem]:
    """Return all problems that can be found, in the order of a start: first problems of the keys, then problems of the
    files and addresses that the valid keys name.

    The TLS files are checked together, and only their first problem is returned. The data is not checked. Other
    processes and machines (sidecars, a Pulsar cluster) are not checked either.
    """
    try:
        config, wrong = examine(file, environment, {})
    except SeqdedupeError as e:
        return [Problem(e)]
    keys = {problem.numbers.get("key") for problem in wrong}
    found = [Problem(problem) for problem in wrong]
    for needed, look in _LOOKS:
        if keys.isdisjoint(needed):
            try:
                found += look(config)
            except SeqdedupeError as e:
                found.append(Problem(e))
            except OSError as e:
                found.append(Problem(error("INVALID_CONFIGURATION", f"{e.filename}: {e.strerror or e}")))
    return found


def _data_directory(config: Config) -> Iterator[Problem]:
    from broker_sidecar import data_directory
    from broker_sidecar.workers import count_of

    folder = Path(config.data_directory)
    data_directory.check_is_no_backup(folder)
    there = next(path for path in (folder, *folder.absolute().parents) if os.path.lexists(path))
    data_directory.check_usable(folder, there)
    if there != folder:
        return
    try:
        data_directory.check_owner(folder, lambda _: os.geteuid())
    except SeqdedupeError as e:
        yield Problem(e, ends_start=False)
    if (owner := owner_of(folder)) is not None:
        yield Problem(in_use(folder, owner), ends_start=False)
    count_of(config)


def _backup_directory(config: Config) -> Iterator[Problem]:
    if config.backup_directory and not Path(config.backup_directory).is_dir():
        yield Problem(_of("backup_directory", config.backup_directory, "there is no such directory"), False)


def _audit_file(config: Config) -> Iterator[Problem]:
    if path := config.audit_file:
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            yield Problem(_of("audit_file", path, f"there is no directory {str(folder)!r}"))
        elif not os.access(path if os.path.exists(path) else folder, os.W_OK, effective_ids=True):
            yield Problem(_of("audit_file", path, "the user who runs this check cannot write to it"), False)


def _own_token(config: Config) -> Iterator[Problem]:
    from broker_sidecar.security import tokens

    path = tokens.path_of(Path(config.data_directory))
    if config.authentication == "token" and os.path.lexists(path):
        tokens.read(path)
    yield from ()


def _token_keys(config: Config) -> Iterator[Problem]:
    if config.token_keys_file:
        from broker_sidecar.security.tokens import read_keys

        read_keys(Path(config.token_keys_file))
    yield from ()


def _tls(config: Config) -> Iterator[Problem]:
    if config.tls_certificate_file:
        from broker_sidecar.security.authentication import Certificates

        Certificates(config)
    yield from ()


def _revoked(config: Config) -> Iterator[Problem]:
    if config.tls_client_crl_file:
        from broker_sidecar.security.authentication import Revoked

        Revoked(Path(config.tls_client_crl_file), Path(config.tls_client_ca_file), lambda: None)
    yield from ()


def _rules(config: Config) -> Iterator[Problem]:
    if config.rules_file:
        from seqdedupe.format import jit

        jit.compile_later()  # rules match names with kernels, and plain functions are fast enough here
        from broker_sidecar.security.rules import read_rules

        read_rules(Path(config.rules_file))
    yield from ()


def _peers(config: Config) -> Iterator[Problem]:
    from seqdedupe.client.credentials import Credentials

    for key, shown in (("peer_token_file", "token_file"), ("peer_tls_ca_file", "tls_ca_file")):
        if path := getattr(config, key):
            try:
                Credentials(**{shown: path})
            except SeqdedupeError as e:
                yield Problem(_of(key, path, e.message))


def _pulsar(config: Config) -> Iterator[Problem]:
    if config.log != "pulsar":
        return
    if importlib.util.find_spec("cramjam") is None:
        what = "log = 'pulsar' needs the package cramjam, which is not installed"
        hint = INSTALL_HINT.format("sidecar,pulsar")
        yield Problem(error("INVALID_CONFIGURATION", what, hint=hint, key="log"))
    if path := config.pulsar.tls_trust_certs_file_path:
        from broker_sidecar.security.authentication import bytes_of, certificates_in

        certificates_in(Path(path), bytes_of(Path(path)))


def _addresses(config: Config) -> Iterator[Problem]:
    from broker_sidecar.workers import addresses_of

    for key in LISTENING:
        for address in addresses_of(getattr(config, key), max(1, config.workers)):
            try:
                yield from _address(address, key)
            except SeqdedupeError as e:
                yield Problem(e, ends_start=False)  # a process listens there: it may be the sidecar itself


def _address(address: SidecarAddress, key: str) -> Iterator[Problem]:
    from broker_sidecar.connections import check_nobody_listens, why_not_bound

    if address.path:
        if not Path(address.path).parent.is_dir():
            folder = str(Path(address.path).parent)
            yield Problem(_of(key, str(address), f"there is no directory {folder!r}"))
        else:
            check_nobody_listens(address, key)
        return
    if (e := why_not_bound(address)) is not None:
        yield Problem(cannot_listen(address, e, key), ends_start=e.errno not in (errno.EADDRINUSE, errno.EACCES))


def _of(key: str, value: str, why: str) -> SeqdedupeError:
    return error("INVALID_CONFIGURATION", f"{key} = {value!r}: {why}", key=key)


_TLS_KEYS = ("tls_certificate_file", "tls_key_file", "tls_client_ca_file")

_LOOKS: tuple[tuple[tuple[str, ...], Callable[[Config], Iterator[Problem]]], ...] = (
    (("data_directory", "log", "workers"), _data_directory),
    ((*LISTENING, "workers"), _addresses),
    ((), _backup_directory),
    ((), _audit_file),
    (("data_directory", "authentication"), _own_token),
    ((), _token_keys),
    (_TLS_KEYS, _tls),
    ((*_TLS_KEYS, "tls_client_crl_file"), _revoked),
    ((), _rules),
    ((), _peers),
    (("log", "pulsar.tls_trust_certs_file_path"), _pulsar),
)
"""The checks in the order of a start, each with the keys that must be valid for it."""


if __name__ == "__main__":
    sys.exit(main())
