"""The sidecar: the server process that uses the library. Begin with `server.py`, which connects its parts.

`__main__.py` and `config.py` define its arguments and configuration. `workers.py` runs several processes on one
directory. A call passes `gate.py`, on a stream of `streams.py`, to its handler in `services/`. `data.py` opens the
directory's contents. `cluster/` handles other sidecars, `security/` handles permissions, and `web/` and `metrics.py`
serve HTTP.
"""
