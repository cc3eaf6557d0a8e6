"""The golden files: what users read of the product, so that each change of it is seen, and none is made unawares."""

from pathlib import Path

from tests.golden.help import pages
from tests.golden.texts import texts

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
NAMES = ("texts.txt", "help.txt")


def content(name: str) -> str:
    """Return what the golden file of this name should hold."""
    return "".join(f"{line}\n" for line in texts(ROOT)) if name == "texts.txt" else "\n".join(pages())
