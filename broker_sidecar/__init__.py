"""The sidecar: the server process around the library. Begin with `server.py`, which joins its parts.

`__main__.py` and `config.py` have its arguments and configuration. `workers.py` runs several processes on one
directory. A call passes `gate.py`, on a stream of `streams.py`, to its handler in `services/`. `data.py` has the
directory's contents, `cluster/` deals with other sidecars, `security/` with permissions, and `web/` and `metrics.py`
with HTTP.
"""
