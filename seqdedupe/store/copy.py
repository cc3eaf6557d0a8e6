"""A store opened to be looked at: a copy of it, since opening one cuts what is torn, and RocksDB always writes."""

import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seqdedupe.errors import error
from seqdedupe.store.db import Store
from seqdedupe.store.records import unseal

_PREFIX = "seqdedupe-store-"


@contextmanager
def opened_copy(folder: Path) -> Iterator[Store]:
    """The store of this folder as the next start would find it, for the length of a block; the folder stays as it is.

    Table files, which nobody ever writes to, are linked; the rest is copied to the system's folder for temporary files.
    Blocks. Raises what `Store.open` raises, STORE_MISSING if there is none; OSError.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        raise error("STORE_MISSING", f"there is no store {folder}")
    with tempfile.TemporaryDirectory(prefix=_PREFIX) as temporary:
        copy = Path(temporary, "store")
        copy.mkdir()
        for path in folder.iterdir():
            if path.suffix == ".sst":
                (copy / path.name).symlink_to(path.resolve())
            elif path.is_file():
                shutil.copyfile(path, copy / path.name)
        store = Store.open(copy)
        try:
            yield store
        finally:
            store.close()


def of_original(message: str, folder: Path) -> str:
    """What was said of a copy, with the name of the folder that was copied."""
    copy = re.escape(str(Path(tempfile.gettempdir(), _PREFIX))) + r"\w+/store"
    return re.sub(copy, lambda _: str(folder), message)


def check_all(store: Store) -> int:
    """Reads every record that is in force, with its checksum; how many there are. Raises STORE_DAMAGED."""
    count = 0
    for key, value in store.scan(b"", b"\xff"):
        unseal(key, value)
        count += 1
    return count
