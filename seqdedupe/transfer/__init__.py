"""Move the state of a topic into or out of a sidecar, and copy the state of a whole data directory.

Begin with `stored_records`, which moves everything that the store contains about a topic to a second store.
`state_messages` builds the messages about a topic's producers, and reads an incoming snapshot. `imports` imports data
into a topic that nobody has used. `backup` copies data directories.
"""
