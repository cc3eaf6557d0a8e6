"""The gRPC services: bytes in, bytes out, and between them a call of the library.

A file is a service (`*_service.py`), or a group of the calls of AdminService, which `admin_service.py` puts together. A
class has one coroutine for each call, and says in `handlers` or `methods` which call that is; `server.py` registers the
services. Every call has passed `gate.py` before: its caller is known, may make it, and it stands in the audit trail.
Begin with `publish_service.py`, for what a stream does, or with `admin_service.py`.
"""
