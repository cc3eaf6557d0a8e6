"""Data directories, examined and salvaged while no sidecar uses them.

Begin with `examine`, which reads everything and returns `findings`, among them what is missing where a log was damaged.
`salvage` writes everything readable into a new directory.
"""
