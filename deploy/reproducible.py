"""Builds wheels and source archives: setuptools' own, made anew so that their bytes depend on the sources alone.

Order, permissions, owners and times do not come from whoever builds. The time is SOURCE_DATE_EPOCH, which `make dist`
takes from the last commit; without it the oldest that an archive can have. A wheel has a bill of materials (`sbom`).
Installing for development is setuptools' own.
"""

import base64
import gzip
import hashlib
import io
import os
import shutil
import stat
import tarfile
import time
import zipfile
from pathlib import Path
from typing import Any

import sbom
from setuptools import build_meta
from setuptools.build_meta import (
    build_editable,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]

_OLDEST = 315_532_800
"""1980-01-01, where a zip archive's time begins."""
_FILE, _PROGRAM = 0o644, 0o755
_LEFT_BY_EARLIER_BUILDS = ("build/lib", "build/bdist.*", "*.egg-info", "spark/*.egg-info")


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None) -> str:
    """PEP 517: the file's name."""
    _forget_earlier_builds()
    name = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
    wheel = Path(wheel_directory, name)
    with zipfile.ZipFile(wheel) as opened:
        files = {item.filename: opened.read(item) for item in opened.infolist() if not item.is_dir()}
    [record] = [path for path in files if path.endswith(".dist-info/RECORD")]
    files[record.replace("RECORD", sbom.PLACE)] = sbom.bill(Path("pyproject.toml"), Path(sbom.LOCK)).encode()
    del files[record]
    lines = [f"{path},{_digest(data)},{len(data)}" for path, data in sorted(files.items())]
    files[record] = "\n".join([*lines, f"{record},,", ""]).encode()
    date = time.gmtime(_epoch())[:6]
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as made:
        # The record last, as a wheel has it.
        for path, data in sorted(files.items(), key=_records_last):
            item = zipfile.ZipInfo(path, date)
            item.external_attr = (stat.S_IFREG | _FILE) << 16
            item.compress_type = zipfile.ZIP_DEFLATED
            made.writestr(item, data)
    return name


def _records_last(file: tuple[str, bytes]) -> tuple[bool, bool, str]:
    return ".dist-info/" in file[0], file[0].endswith("/RECORD"), file[0]


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    """PEP 517: the file's name."""
    _forget_earlier_builds()
    name = build_meta.build_sdist(sdist_directory, config_settings)
    archive = Path(sdist_directory, name)
    made = io.BytesIO()
    with tarfile.open(archive) as opened, tarfile.open(fileobj=made, mode="w", format=tarfile.PAX_FORMAT) as anew:
        for member in sorted(opened.getmembers(), key=lambda member: member.name):
            content = opened.extractfile(member)
            item = tarfile.TarInfo(member.name)
            item.type, item.size, item.mtime = member.type, member.size, _epoch()
            item.mode = _PROGRAM if member.isdir() or member.mode & stat.S_IXUSR else _FILE
            anew.addfile(item, content)
    with archive.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=_epoch()) as packed:
        packed.write(made.getvalue())
    return name


def _epoch() -> int:
    return max(int(os.environ.get("SOURCE_DATE_EPOCH") or _OLDEST), _OLDEST)


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")


def _forget_earlier_builds() -> None:
    """setuptools would take from them what is not among the sources any more."""
    for pattern in _LEFT_BY_EARLIER_BUILDS:
        for folder in Path().glob(pattern):
            shutil.rmtree(folder)
