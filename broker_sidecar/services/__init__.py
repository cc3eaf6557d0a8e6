"""The gRPC services: bytes come in, bytes go out, and between them is a call of the library.

A file is a service (`*_service.py`), or a group of the calls of AdminService, which `admin_service.py` collects. A
class has one coroutine for each call; its `handlers` or `methods` map the names of calls to them. `server.py` registers
the services. Every call has passed `gate.py` before: its caller is known and may make it, and the audit trail records
it. Begin with `publish_service.py` for streams, or with `admin_service.py`.
"""
