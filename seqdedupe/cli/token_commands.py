"""The commands about permissions: signed tokens, rules, and the audit trail."""

import json
import os
import secrets
import time
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from seqdedupe.audit_trail import TrailLink, verify
from seqdedupe.cli.common import as_json_option, seconds_of, tell
from seqdedupe.command import FAILED, WRONG_USAGE, echo, needing, print_json, printable, say_failure
from seqdedupe.errors import AccessDeniedError, SeqdedupeError, error
from seqdedupe.figures import counted
from seqdedupe.files import sync_folder, write_synced
from seqdedupe.names import is_namespace, namespace_name, producer_name, topic_name

if TYPE_CHECKING:
    from jwt import PyJWK

    from broker_sidecar.security.rules import RuleDecision

MAX_READ_BYTES = 64 * 1024
"""The largest input that is read as a token."""

_File = click.Path(path_type=Path, dir_okay=False)


class _Duration(click.ParamType[int]):
    """A number of seconds, as `90s`, `15m`, `12h` or `30d`."""

    name = "duration"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if (seconds := seconds_of(value)) is None:
            self.fail(f"{value!r} does not have the form 90s, 15m, 12h or 30d", param, ctx)
        return seconds


def _needing_the_sidecar() -> AbstractContextManager[None]:
    return needing("this needs", "sidecar")


@click.group()
def token() -> None:
    """Create keys, sign tokens with them, and validate tokens, for sidecars with token_keys_file."""


@token.command()
@click.argument("private_file", type=_File)
@click.argument("keys_file", type=_File)
@click.option("--key-id", metavar="NAME", help="The name of the key, `kid`. Default: a random name.")
def keys(private_file: Path, keys_file: Path, key_id: str | None) -> None:
    """Create a key that signs tokens in PRIVATE_FILE, and add the key's public part to KEYS_FILE (JWKS).

    KEYS_FILE is the token_keys_file of sidecars. Everybody who can read PRIVATE_FILE can sign tokens.
    """
    kid = key_id or secrets.token_hex(8)
    with _needing_the_sidecar():
        _make_keys(private_file, keys_file, kid)
    echo(printable(f"key {kid}: {private_file} signs tokens, {keys_file} checks them"))


@token.command()
@click.option("--key-file", type=_File, required=True, help="The private key: JWK, or PEM without a password.")
@click.option("--key-id", metavar="NAME", help="The name of the key, `kid`, if the file has no name.")
@click.option("--subject", required=True, metavar="NAME", help="The owner of the token, `sub`. Rules use this name.")
@click.option("--audience", required=True, metavar="NAME", help="The sidecars' token_audience, `aud`.")
@click.option(
    "--expires-in", type=_Duration(), required=True, metavar="TIME", help="The lifetime, such as 90s, 15m, 12h or 30d."
)
def create(key_file: Path, key_id: str | None, subject: str, audience: str, expires_in: int) -> None:
    """Create a signed token, and print it."""
    with _needing_the_sidecar():
        import jwt

        key, kid = _read_private_key(key_file, key_id)
    now_seconds = int(time.time())
    claims = {"sub": subject, "aud": audience, "iat": now_seconds, "exp": now_seconds + expires_in}
    echo(jwt.encode(claims, key, key.algorithm_name, headers={"kid": kid}))


@token.command()
@click.option("--keys-file", type=_File, required=True, help="The public keys: the sidecars' token_keys_file.")
@click.option("--audience", required=True, metavar="NAME", help="The sidecars' token_audience.")
@click.option("--token-file", type=click.File("rb"), default="-", help="The token. Default: standard input.")
@as_json_option
def validate(keys_file: Path, audience: str, token_file: IO[bytes], as_json: bool) -> None:
    """Check that a sidecar would accept a token now. Show the token's owner and when the token expires."""
    with _needing_the_sidecar():
        from broker_sidecar.security.tokens import LEEWAY_SECONDS, read_keys, verify
    shown = token_file.read(MAX_READ_BYTES)
    try:
        claims = verify(shown.strip(), read_keys(keys_file), audience)
    except AccessDeniedError as e:
        hint = "It needs these keys and this audience. Is it for another sidecar, or was only a part copied?"
        raise error(e.reason, e.message, hint=hint) from e
    expires_at_seconds = int(claims.expires_at_seconds) - LEEWAY_SECONDS
    values = {"subject": claims.subject, "expires_at_seconds": expires_at_seconds}
    expires_at = datetime.fromtimestamp(expires_at_seconds, UTC)
    tell(as_json, values, f"{claims.subject}, until {expires_at:%Y-%m-%d %H:%M:%S} UTC")


# -- The keys. The sidecar checks the tokens that they sign, so this needs the sidecar's packages.

_SECRET_PARTS = frozenset({"d", "p", "q", "dp", "dq", "qi", "oth"})
"""The secret members of a private key as JSON."""


def _read_private_key(path: Path, kid: str | None) -> "tuple[PyJWK, str]":
    """Return the key in a file (a JSON Web Key or PEM), and the `kid`. Only a JSON Web Key contains a `kid`.

    Raises INVALID_CONFIGURATION; OSError.
    """
    import jwt
    from cryptography.exceptions import UnsupportedAlgorithm

    from broker_sidecar.security.tokens import ALGORITHMS

    data = path.read_bytes()
    try:
        found = _jwk_of_pem(data) if b"-----BEGIN" in data else json.loads(data)
        algorithm = ALGORITHMS.get((found["kty"], found.get("crv")))
        if algorithm is None or "d" not in found:
            raise _unusable(path)
        key = jwt.PyJWK(found, algorithm)
    except (ValueError, TypeError, KeyError, AttributeError, UnsupportedAlgorithm, jwt.PyJWTError) as e:
        raise _unusable(path) from e
    kid = kid or found.get("kid")
    if not kid or not isinstance(kid, str):
        why = f"the key in {path} has no name"
        raise error("INVALID_CONFIGURATION", why, hint="Give the name of its public key with --key-id.")
    return key, kid


def _jwk_of_pem(pem: bytes) -> dict[str, Any]:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key
    from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

    match load_pem_private_key(pem, None):
        case Ed25519PrivateKey() as key:
            return OKPAlgorithm.to_jwk(key, as_dict=True)
        case EllipticCurvePrivateKey() as key:
            return ECAlgorithm.to_jwk(key, as_dict=True)
        case RSAPrivateKey() as key:
            return RSAAlgorithm.to_jwk(key, as_dict=True)
    raise ValueError("a key of another kind")


def _unusable(path: Path) -> SeqdedupeError:
    why = "holds no private key of the kinds Ed25519, P-256 and RSA, as PEM without a password or as JWK"
    return error("INVALID_CONFIGURATION", f"the file {path} {why}", hint="`seqdedupe token keys` creates such a file.")


def _make_keys(private_file: Path, keys_file: Path, kid: str) -> None:
    """Make a key (Ed25519) in a file that only the file's owner may read. Add the public part of the key to a set of
    keys.

    Raises INVALID_CONFIGURATION if the private file exists, or if the set is invalid or already has a key of this name;
    OSError.
    """
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from jwt.algorithms import OKPAlgorithm

    from broker_sidecar.security.tokens import read_keys

    if private_file.exists():
        raise error(
            "INVALID_CONFIGURATION", f"{private_file} is there already", hint="Name a different file for the key."
        )
    known = []
    if keys_file.exists():
        if kid in read_keys(keys_file):
            raise error(
                "INVALID_CONFIGURATION", f"{keys_file} has a key {kid!r} already", hint="Give a different --key-id."
            )
        known = json.loads(keys_file.read_bytes())["keys"]
    made: dict[str, Any] = OKPAlgorithm.to_jwk(Ed25519PrivateKey.generate(), as_dict=True)
    private = made | {"kid": kid, "alg": "EdDSA", "use": "sig"}
    public = {name: value for name, value in private.items() if name not in _SECRET_PARTS and name != "key_ops"}
    write_synced(private_file, json.dumps(private, indent=2).encode() + b"\n")
    keys_file = keys_file.resolve()  # a symbolic link stays one
    new = keys_file.with_name(f"{keys_file.name}.new")
    write_synced(new, json.dumps({"keys": [*known, public]}, indent=2).encode() + b"\n")
    new.chmod(0o644)
    os.replace(new, keys_file)
    sync_folder(keys_file.parent)


# -- The commands about permissions.

ACTIONS = ("publish", "read", "create", "observe", "administer", "attach")
_ALSO_OF_SEVERAL = ("observe", "administer")
"""Actions that some calls need on a whole namespace, or on all topics."""

_EVERYTHING = "*"


@click.group()
def auth() -> None:
    """Show what a rules file allows."""


def _of_actions(command: click.decorators.FC) -> click.decorators.FC:
    for action in reversed(ACTIONS):
        what = "topic, tenant/namespace, or *: everything" if action in _ALSO_OF_SEVERAL else "topic"
        command = click.option(f"--{action}", metavar="NAME", help=f"Whether the caller may {action} this {what}.")(
            command
        )
    return command


@auth.command(short_help="Show which rule decides.")
@click.option(
    "--rules",
    "file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="The rules file.",
)
@click.option("--as", "subject", required=True, help="The caller: the name in the caller's token or certificate.")
@_of_actions
@click.option(
    "--producer",
    help="With --publish: the producer name; '': no name, for deduplication IDs. Default: any name.",
)
@click.option(
    "--cursor",
    help="With --read: whether the caller may move this cursor. Default: whether the caller may read messages.",
)
@as_json_option
def explain(
    file: Path, subject: str, producer: str | None, cursor: str | None, as_json: bool, **asked: str | None
) -> int:
    """Show which rule of a rules file decides. The command needs no sidecar. Rules do not limit the data directory's
    token, which may do everything.

    Exit status 0: allowed; 1: denied; 2: the check was not possible.
    """
    given = [(action, what) for action, what in asked.items() if what is not None]
    if len(given) != 1:
        raise click.UsageError(f"Give one of {', '.join(f'--{action}' for action in ACTIONS)}.")
    [(action, what)] = given
    if producer is not None and action != "publish":
        raise click.UsageError("--producer goes with --publish.")
    if cursor is not None and action != "read":
        raise click.UsageError("--cursor goes with --read.")
    try:
        name, decision = _decide(file, subject, action, what, producer, cursor)
    except SeqdedupeError as e:
        say_failure("seqdedupe", e, as_json=as_json)
        return WRONG_USAGE
    rule = decision.rule and decision.rule.name
    asked_for = {"subject": subject, "action": action, "name": name, "producer_name": producer, "cursor": cursor}
    text = f"{'allowed' if decision.is_allowed else 'denied'}: {rule or 'no rule allows it'}"
    tell(as_json, asked_for | {"is_allowed": decision.is_allowed, "rule": rule}, text)
    return 0 if decision.is_allowed else FAILED


def _decide(
    file: Path, subject: str, action: str, what: str, producer: str | None, cursor: str | None
) -> "tuple[str, RuleDecision]":
    """Return the full name of the object, and the decision. Raises INVALID_CONFIGURATION, and the errors of names."""
    from broker_sidecar import kernels

    kernels.prepare()
    from broker_sidecar.security.rules import Action, read_rules

    rules = read_rules(file).rules
    if action in _ALSO_OF_SEVERAL and what == _EVERYTHING:
        return what, rules.decide_everything(subject, Action(action))
    if action in _ALSO_OF_SEVERAL and is_namespace(what):
        return what, rules.decide_namespace(subject, Action(action), namespace_name(what))
    topic = topic_name(what)
    if producer:
        producer_name(producer)
    return topic, rules.decide(subject, Action(action), topic, producer if cursor is None else cursor)


# -- `seqdedupe audit`: the check that an audit trail is as it was written.


@click.group()
def audit() -> None:
    """Verify the audit trail, which records operators' actions and refused callers (docs/guides/audit.md)."""


@audit.command("verify", short_help="Verify that no line was changed, removed or inserted.")
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--expect",
    metavar="NUMBER:HASH",
    help="A line that must be there, as this command printed it earlier. Only this shows that a trail was cut or "
    "written again.",
)
@as_json_option
def verify_files(files: tuple[Path, ...], expect: str | None, as_json: bool) -> int:
    """Verify an audit trail in FILES, the oldest file first. Print the number and hash of the last line. Store this
    number and hash on another machine, and pass them to a later check with --expect."""
    expected = TrailLink.parse(expect) if expect else None
    found = verify(files, expected)
    if not found.has_expected:
        raise error("AUDIT_DAMAGED", f"line {expect} is not in the trail: the trail was cut or written again")
    if as_json:
        print_json(
            {
                "lines": found.lines,
                "first_number": found.first_number,
                "chains": found.chains,
                "last": str(found.last),
                "last_time": found.last_time,
                "torn_bytes": found.torn_bytes,
            }
        )
        return 0
    echo(f"{found.lines} lines, all as they were written" if found.lines else "no line")
    if found.lines:
        echo(f"last {found.last} at {found.last_time}")
    if found.first_number > 1:
        echo(f"The first line has number {found.first_number}: earlier lines are in other files.")
    if found.chains > 1:
        echo(
            f"The trail was started again {counted(found.chains - 1, 'time')}. "
            "Lines may be missing there without a trace."
        )
    if found.torn_bytes:
        echo(f"The last {found.torn_bytes} bytes belong to a line that is being written or was cut off.")
    return 0
