"""Webhooks, each stored once."""
