"""Bytes: where the parts of a batch and of a record stand. Nobody else counts places."""
