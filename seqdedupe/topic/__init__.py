"""One topic: who may publish, what is admitted, what was confirmed, and who reads it; and all topics of a sidecar.

Begin with `topic`, in which a `frame` is admitted as its `judge` says; `base` draws a topic's states, `owner` moves it
through those that its log decides. All of them by name are in `directory`, with what is under way in `registry`.
`open_call`, `readers`, `cursors` and `operations` are what is asked of a topic beside frames. A broker's topic is
`attached`.
"""
