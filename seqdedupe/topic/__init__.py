"""The state and operations of one topic: admission and confirmation of messages, sessions of producers, and reading.
Also the directory of all topics of a sidecar.

Begin with `topic`. The topic's `judge` decides whether the topic admits a `frame`. `base` contains a drawing of a
topic's states. `owner` makes the state changes that the log causes. `directory` contains all topics by name, and
`registry` the operations in progress. `readers` and `operations` serve all requests other than frames. `attached` is a
topic whose log belongs to a broker.
"""
