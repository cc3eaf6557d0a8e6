"""What was imported into a topic of deduplication IDs: the log says what it was, and the store is to have it."""

from seqdedupe.doctor.findings import TopicFindings
from seqdedupe.errors import DamagedError
from seqdedupe.store import imported as stored_import
from seqdedupe.store.db import Store
from seqdedupe.store.id_runs import read_pages
from seqdedupe.topic.imported_window import ImportedWindow

PAGES_AT_ONCE = 1024

IMPORT_AGAIN = "start the sidecar and import the same file again (seqdedupe import): until then it takes no messages"


def examine_imported(found: TopicFindings, store: Store | None, wanted: ImportedWindow) -> None:
    """Puts into `found` how many IDs there are, and why not all of them."""
    found.imported_ids = wanted.ids
    found.imported_why = _why(store, found.incarnation, wanted)
    if found.imported_why:
        found.cures.append(IMPORT_AGAIN)


def _why(store: Store | None, incarnation: int, wanted: ImportedWindow) -> str:
    if store is None:
        return "the store is not there, or damaged"
    try:
        there = stored_import.load(store, incarnation)
        if there is None or there.checksum != wanted.checksum:
            return "the store does not have them"
        pages = len(there.run.first_hashes)
        for first in range(0, pages, PAGES_AT_ONCE):
            some = range(first, min(first + PAGES_AT_ONCE, pages))
            read_pages(store, incarnation, [(there.run.number, page) for page in some])
    except DamagedError as e:
        return e.message
    return ""
