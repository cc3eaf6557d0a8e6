"""Data directories, examined and salvaged while no sidecar runs on them.

Begin with `examine`, which reads everything and comes to `findings`; `tally` counts what is missing where a log was
damaged. `salvage` writes what can be read into a new directory.
"""
