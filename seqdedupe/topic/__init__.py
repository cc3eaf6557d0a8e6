"""One topic: who may publish, what it admits, what it has confirmed, and who reads it; and all topics of a sidecar.

Begin with `topic`. It admits a `frame` as its `judge` decides. `base` draws a topic's states; `owner` makes the changes
of state that the log causes. `directory` has all topics by name, and `registry` the work in progress. `open_call`,
`readers` and `operations` serve all requests other than frames. `attached` is the topic of a broker.
"""
