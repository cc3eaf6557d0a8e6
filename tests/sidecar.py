"""`seqdedupe.testing.Sidecar`, under the name that tests knew it by."""

from seqdedupe.testing import Sidecar

__all__ = ["Sidecar"]
