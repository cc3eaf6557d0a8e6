"""Tokens that are signed: made, and looked into."""

import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

import click

from seqdedupe.cli.options import as_json_option, print_json
from seqdedupe.command import echo, printable
from seqdedupe.errors import AccessDeniedError, error

MAX_READ_BYTES = 64 * 1024
"""Of what may be a token."""

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhd])")

_File = click.Path(path_type=Path, dir_okay=False)


class _Duration(click.ParamType[int]):
    """A number of seconds, as `90s`, `15m`, `12h` or `30d`."""

    name = "duration"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if (said := _DURATION.fullmatch(value)) is None:
            self.fail(f"{value!r} is none of the form 90s, 15m, 12h or 30d", param, ctx)
        return int(said[1]) * _SECONDS[said[2]]


@contextmanager
def _needs_the_sidecar() -> Iterator[None]:
    try:
        yield
    except ModuleNotFoundError as e:
        if e.name in ("jwt", "cryptography"):
            hint = "Install it: pip install 'seqdedupe[sidecar]'"
            raise error("INVALID_CONFIGURATION", f"this needs {e.name}, which is not installed", hint=hint) from e
        raise


@click.group(short_help="Make and check tokens that are signed.")
def token() -> None:
    """Make keys, sign tokens with them, and check tokens, as a sidecar with token_keys_file takes them."""


@token.command()
@click.argument("private_file", type=_File)
@click.argument("keys_file", type=_File)
@click.option("--key-id", metavar="NAME", help="The key's name, `kid`. Left out: one is made up.")
def keys(private_file: Path, keys_file: Path, key_id: str | None) -> None:
    """Make a key that signs tokens, PRIVATE_FILE, and add its public part to KEYS_FILE (JWKS).

    Sidecars get KEYS_FILE as their token_keys_file. Whoever can read PRIVATE_FILE can make tokens.
    """
    with _needs_the_sidecar():
        from seqdedupe.cli.signing import make_keys
    kid = key_id or secrets.token_hex(8)
    make_keys(private_file, keys_file, kid)
    echo(printable(f"key {kid}: {private_file} signs tokens, {keys_file} checks them"))


@token.command()
@click.option("--key-file", type=_File, required=True, help="The private key: JWK, or PEM without a password.")
@click.option("--key-id", metavar="NAME", help="The key's name, `kid`, if the file does not say it.")
@click.option("--subject", required=True, metavar="NAME", help="Whose the token is: the role that rules name, `sub`.")
@click.option("--audience", required=True, metavar="NAME", help="The sidecars' token_audience, `aud`.")
@click.option("--expires-in", type=_Duration(), required=True, metavar="TIME", help="As 90s, 15m, 12h or 30d.")
def create(key_file: Path, key_id: str | None, subject: str, audience: str, expires_in: int) -> None:
    """Sign a token, and print it."""
    with _needs_the_sidecar():
        from seqdedupe.cli.signing import read_private_key, sign
    key, kid = read_private_key(key_file, key_id)
    echo(sign(key, kid, subject, audience, int(time.time()), expires_in))


@token.command()
@click.option("--keys-file", type=_File, required=True, help="The public keys: the sidecars' token_keys_file.")
@click.option("--audience", required=True, metavar="NAME", help="The sidecars' token_audience.")
@click.option("--token-file", type=click.File("rb"), default="-", help="The token. Left out: standard input.")
@as_json_option
def validate(keys_file: Path, audience: str, token_file: IO[bytes], as_json: bool) -> None:
    """Say whose a token is and when it expires, if a sidecar would take it now."""
    with _needs_the_sidecar():
        from broker_sidecar.security.signed_tokens import LEEWAY_SECONDS, read_keys, verify
    shown = token_file.read(MAX_READ_BYTES)
    try:
        claims = verify(shown.strip(), read_keys(keys_file), audience)
    except AccessDeniedError as e:
        hint = "A token of these keys and this audience is valid: is it another sidecar's, or was it not all copied?"
        raise error(e.reason, e.message, hint=hint) from e
    expires_at_seconds = int(claims.expires_at_seconds) - LEEWAY_SECONDS
    if as_json:
        print_json({"subject": claims.subject, "expires_at_seconds": expires_at_seconds})
        return
    expires_at = datetime.fromtimestamp(expires_at_seconds, UTC)
    echo(printable(f"{claims.subject}, until {expires_at:%Y-%m-%d %H:%M:%S} UTC"))
