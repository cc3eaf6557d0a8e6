"""The sidecar: the server process around the library. Begin with `server.py`, which joins its parts.

`__main__.py` and `config.py` are what it is told, `workers.py` several processes on one directory. A call comes through
`gate.py`, on a stream of `streams.py`, to its handler in `services/`. `data.py` is what the directory holds, `cluster/`
other sidecars, `security/` who may do what, `web/` and `metrics.py` the HTTP side.
"""
