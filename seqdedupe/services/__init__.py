"""Patterns of services over the sidecar, each one object: needs the extra `services`."""
