"""The rule and the state it stands on: pure, without I/O, clock, asyncio or gRPC.

Begin with `rule`: whether a frame is admitted, and what each of its rows is. `producers` has the state that it judges
by, with `name_table` and `recent`; `replay` brings in what is in the log. By deduplication ID it is
`id_window` instead, which stands on `id_slots` (in memory), `id_runs` (on disk) and `id_table` (the hash table).
"""
