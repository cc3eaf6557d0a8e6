"""`python -m seqdedupe.functions.wheel CODE … --output FILE`: build one wheel from the wrapper, the client and a
function's code.

Pulsar unpacks the wheel and installs nothing else. So the wheel declares no dependencies: the worker's Python
environment must contain them (docs/guides/functions.md). The same code results in a wheel with the same bytes.
"""

import base64
import hashlib
import sys
import zipfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import click

from seqdedupe.command import run_command
from seqdedupe.errors import error

PACKAGE = Path(__file__).parents[1]
PARTS = ("*.py", "py.typed", "client/**/*.py", "functions/**/*.py", "v1/**/*.py")
"""The files of this package that the wrapper imports."""

RUNTIME_MODULES = frozenset(
    (
        *("Function_pb2", "InstanceCommunication_pb2", "InstanceCommunication_pb2_grpc", "contextimpl"),
        *("function_stats", "log", "prometheus_client_fix", "python_instance", "python_instance_main"),
        *("secretsprovider", "server", "state_context", "util"),
    )
)
"""The modules of Pulsar's Python runtime. A module of the function with such a name would never be imported, because
the runtime's module is already loaded."""

_FIRST_TIME = (1980, 1, 1, 0, 0, 0)
_MODE = 0o644 << 16


def _files(code: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    """Yield the names and contents of the files in the wheel."""
    for pattern in PARTS:
        for path in sorted(PACKAGE.glob(pattern)):
            yield f"seqdedupe/{path.relative_to(PACKAGE).as_posix()}", path.read_bytes()
    for given in code:
        root = given.resolve()
        if root.stem == PACKAGE.name:
            raise error("INVALID_FUNCTION", f"{given} has the name of this package: rename it")
        if root.stem in RUNTIME_MODULES:
            raise error("INVALID_FUNCTION", f"{given} has the name of a module of Pulsar's runtime: rename it")
        if root.suffix == ".py" and root.is_file():
            yield root.name, root.read_bytes()
        elif (root / "__init__.py").is_file():
            for path in sorted(path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts):
                yield path.relative_to(root.parent).as_posix(), path.read_bytes()
        else:
            raise error(
                "INVALID_FUNCTION",
                f"{given} is not a Python module: a .py file, or a folder with __init__.py, is needed",
            )


def build(code: Sequence[Path], output: Path) -> None:
    """Write the wheel. Raises INVALID_FUNCTION if a path in `code` is not a module, two modules have the same name, or
    `output` does not end in .whl; OSError."""
    if output.suffix != ".whl":
        raise error(
            "INVALID_FUNCTION", f"{output} is not the name of a wheel: Pulsar unpacks only files that end in .whl"
        )
    version = metadata.version("seqdedupe")
    info = f"{output.stem.split('-')[0]}-{version}.dist-info"
    files = list(_files(code))
    names = [name for name, _ in files]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise error("INVALID_FUNCTION", f"two modules have the name {doubled[0]}")
    about = f"Metadata-Version: 2.1\nName: {info.split('-')[0]}\nVersion: {version}\n"
    kind = "Wheel-Version: 1.0\nGenerator: seqdedupe\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files += [(f"{info}/METADATA", about.encode()), (f"{info}/WHEEL", kind.encode())]
    records = [
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}"
        for name, data in files
    ]
    files.append((f"{info}/RECORD", "\n".join([*records, f"{info}/RECORD,,", ""]).encode()))
    output.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(output, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in files:
            entry = zipfile.ZipInfo(name, _FIRST_TIME)
            entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, _MODE
            wheel.writestr(entry, data)


@click.command()
@click.argument("code", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option(
    "--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="NAME-VERSION-py3-none-any.whl"
)
def main(code: tuple[Path, ...], output: Path) -> None:
    """Builds a wheel out of the modules CODE and the wrapper, to be deployed as a Pulsar Function."""
    build(code, output)
    click.echo(f"{output}: {output.stat().st_size:,} bytes; class name seqdedupe.functions.DedupeFunction")


if __name__ == "__main__":
    sys.exit(run_command(main, "seqdedupe.functions.wheel"))
