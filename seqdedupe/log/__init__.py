"""Logs that a topic can stand on: one small contract, and who keeps it."""
