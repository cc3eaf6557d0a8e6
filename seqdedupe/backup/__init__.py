"""Backups of a data directory: what one holds, making one of a sidecar that runs, and restoring it.

Begin with `manifest`: what a backup consists of, and how it is checked and restored. `maker` writes one.
"""
