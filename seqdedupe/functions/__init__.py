"""Pulsar Functions that take effect exactly once: `DedupeFunction` around a function that knows nothing of it.

docs/functions.md says how it is deployed. Needs what Pulsar's Python runtime has, grpcio, googleapis-common-protos,
grpcio-status and numpy.
"""

from seqdedupe.functions.function import DedupeFunction

__all__ = ["DedupeFunction"]
