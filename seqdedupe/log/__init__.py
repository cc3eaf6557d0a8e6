"""Logs that topics are stored in: one small contract, and its implementations."""
