"""The embedded log: one folder of append-only segment files a topic.

Begin with `log`, one topic's, and `logs`, all of a sidecar. What is appended goes over `commit` (one thread for all,
and its journal) and `writer` into a `segment`, which is synced later. A start reads `journal_replay` and
`tail`. `reader` serves readers; `inspection` reads every byte, for the scrub and the doctor; `log_folder` has the small
files beside the segments: a log's secret, and that it is another sidecar's.
"""
