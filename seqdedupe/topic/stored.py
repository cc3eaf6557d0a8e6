"""What the store has of a topic, read into memory, for one that is opened from it."""

from dataclasses import dataclass

from seqdedupe.core.id_runs import ImportedIds
from seqdedupe.core.producers import Producers
from seqdedupe.store.snapshots import Loaded, Snapshots


@dataclass(frozen=True, slots=True)
class Stored:
    """It is one topic's alone, which changes it. Nobody may have written of the topic since it was read."""

    snapshots: Snapshots
    loaded: Loaded | None
    """Its newest snapshot."""
    producers: Producers
    """Those of that."""
    imported: ImportedIds | None = None

    @staticmethod
    def load(snapshots: Snapshots) -> "Stored":
        """Takes long, in any thread. Raises as `Snapshots.load`."""
        loaded = snapshots.load()
        return Stored(snapshots, loaded, producers_of(loaded))


def producers_of(loaded: Loaded | None) -> Producers:
    """The producers of a snapshot. The names are theirs from now on."""
    producers = Producers()
    if loaded is not None:
        producers.load(loaded.names, loaded.persisted, loaded.epochs, loaded.stated)
        producers.has_forgotten = loaded.has_forgotten
    return producers
