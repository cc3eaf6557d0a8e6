"""How the state of a topic leaves a sidecar and enters one, and how the state of a whole data directory does.

Begin with `stored_records`: everything that the store has of a topic, on its way to another store. `state_messages`
holds the messages about a topic's producers, and reads an incoming snapshot. `imports` holds imports into a topic that
nobody has used. `backup` is about copies of a data directory.
"""
