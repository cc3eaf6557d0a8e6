"""Move the state of a topic into or out of a sidecar, and copy the state of a whole data directory.

Begin with `stored_records`, which moves everything that the store holds about a topic to another store.
`topic_state` builds the messages about a topic's producers, reads an incoming snapshot, and imports data into a topic
that nobody has used. `backup` copies data directories.
"""
