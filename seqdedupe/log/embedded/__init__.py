"""The embedded log: one folder of append-only segment files per topic.

Begin with `log`, the log of one topic, and `logs`, all logs of a sidecar. Appends go through `commit` (one thread for
all topics, and its journal) and `writer` into a `segment`, which is synced later. A start reads `journal_replay` and
`tail`. `reader` serves readers. `inspection` reads every byte, for the scrub and the doctor. `log_folder` handles the
small files next to the segments: a log's secret, and the record that another sidecar has the log.
"""
