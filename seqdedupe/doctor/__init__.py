"""Examine and salvage data directories while no sidecar uses them.

Begin with `examine`, which reads everything and returns `findings`. The findings also list the messages that are
missing because a log is damaged. `salvage` writes everything readable into a new directory.
"""
