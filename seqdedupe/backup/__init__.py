"""Backups of a data directory: what one holds, making one of a sidecar that runs, and restoring it."""
