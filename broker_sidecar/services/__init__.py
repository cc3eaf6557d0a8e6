"""The gRPC services. Each call decodes bytes, calls the library, and encodes the answer.

A file is a service (`*_service.py`), or a group of the calls of AdminService, which `admin_service.py` combines. A
class has one coroutine for each call. The class's `handlers` or `methods` map the names of calls to these coroutines.
`server.py` registers the services. Every call has passed `gate.py` before. So its caller is known and has permission,
and the audit trail records the call. Begin with `publish_service.py` for streams, or with `admin_service.py`.
"""
