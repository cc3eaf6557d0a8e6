"""Making files durable."""

import os
from pathlib import Path


def sync_folder(folder: Path) -> None:
    """Makes the entries of a folder durable. Raises OSError."""
    file = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
