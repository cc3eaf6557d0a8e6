"""The embedded log: one folder of append-only segment files per topic.

Begin with `log`, the log of one topic, and `logs`, all logs of a sidecar.

- Appends go through `commit` (one thread for all topics, with the journal) and `writer` into a `segment`. The segment
  is synced later.
- At a start, `journal_replay` restores records from the journal, and `tail` opens the last segment.
- `reader` serves readers.
- `inspection` reads every byte of a log, for the scrub and the doctor.
- `log_folder` handles the small files next to the segments: a log's secret, and the record that another sidecar has the
  log.
"""
