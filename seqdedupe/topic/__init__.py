"""One topic: which clients may publish, which messages it admits and has confirmed, and who reads them. Also all topics
of a sidecar.

Begin with `topic`. A topic admits a `frame` as its `judge` decides. `base` contains a drawing of a topic's states;
`owner` makes the changes of state that the log causes. `directory` contains all topics by name, and `registry` the
operations in progress. `readers` and `operations` serve all requests other than frames. `attached` is the topic of a
broker.
"""
