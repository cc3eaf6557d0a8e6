"""Finds all problems for which a start would refuse a configuration, without a start. The check locks, creates and
writes nothing.

`config.py` checks the keys. This module checks the directories, files and addresses that the keys name. A problem is
only a warning if it may not exist for the sidecar's own user, or if a running sidecar causes it.
"""

import errno
import importlib.util
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from broker_sidecar import data_directory
from broker_sidecar.config import Config, examine
from broker_sidecar.sockets import check_nobody_listens
from seqdedupe.address import SidecarAddress, cannot_listen, family_of
from seqdedupe.client.credentials import Credentials
from seqdedupe.errors import INSTALL_HINT, SeqdedupeError, error
from seqdedupe.format import jit
from seqdedupe.locks import in_use, owner_of


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
    # Import it here: its imports take long.
    from broker_sidecar.workers import count_of

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
        jit.compile_later()  # rules match names by kernels, and these are few
        from broker_sidecar.security.rules import read_rules

        read_rules(Path(config.rules_file))
    yield from ()


def _peers(config: Config) -> Iterator[Problem]:
    for key, shown in (("peer_token_file", "token_file"), ("peer_tls_ca_file", "tls_ca_file")):
        if path := getattr(config, key):
            try:
                Credentials(**{shown: path})
            except SeqdedupeError as e:
                yield Problem(_of(key, path, e.message))


def _pulsar(config: Config) -> Iterator[Problem]:
    if config.log != "pulsar":
        return
    if importlib.util.find_spec("pulsar") is None:
        what = "log = 'pulsar' needs the package pulsar-client, which is not installed"
        hint = INSTALL_HINT.format("sidecar,pulsar")
        yield Problem(error("INVALID_CONFIGURATION", what, hint=hint, key="log"))
    if path := config.pulsar.tls_trust_certs_file_path:
        from broker_sidecar.security.authentication import bytes_of, certificates_in

        certificates_in(Path(path), bytes_of(Path(path)))


def _addresses(config: Config) -> Iterator[Problem]:
    for key in ("listen", "also_listen", "metrics_listen", "pulsar_listen"):
        if text := getattr(config, key):
            try:
                yield from _address(SidecarAddress.parse(text), key)
            except SeqdedupeError as e:
                yield Problem(e, ends_start=False)  # a process listens there: it may be the sidecar itself


def _address(address: SidecarAddress, key: str) -> Iterator[Problem]:
    if address.path:
        if not Path(address.path).parent.is_dir():
            folder = str(Path(address.path).parent)
            yield Problem(_of(key, str(address), f"there is no directory {folder!r}"))
        else:
            check_nobody_listens(address, key)
        return
    with socket.socket(family_of(address.host)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address.host.strip("[]"), address.port))
        except OSError as e:
            yield Problem(cannot_listen(address, e, key), ends_start=e.errno not in (errno.EADDRINUSE, errno.EACCES))


def _of(key: str, value: str, why: str) -> SeqdedupeError:
    return error("INVALID_CONFIGURATION", f"{key} = {value!r}: {why}", key=key)


_TLS_KEYS = ("tls_certificate_file", "tls_key_file", "tls_client_ca_file")

_LOOKS: tuple[tuple[tuple[str, ...], Callable[[Config], Iterator[Problem]]], ...] = (
    (("data_directory", "log", "workers"), _data_directory),
    (("listen", "also_listen", "metrics_listen", "pulsar_listen"), _addresses),
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
