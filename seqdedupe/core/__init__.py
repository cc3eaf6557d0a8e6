"""The deduplication rule and the state on which it is based. The code here is pure: no I/O, no clock, no asyncio, no
gRPC.

Begin with `rule`, which decides whether a frame is admitted, and the verdict of each row. `producers` contains the
state that the rule needs, with `name_table` and `recent`; `recent` also merges the contents of the log into this state.
For deduplication IDs the state is `id_window`, which is based on `id_slots` (in memory), `id_runs` (on disk) and
`id_table` (the hash table).
"""
