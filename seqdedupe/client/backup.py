"""Having backups made: each process makes its own, all at once."""

import asyncio
from collections.abc import Callable

from seqdedupe.client.calls import Calls, Connection
from seqdedupe.client.connection import check_not_forked, typed_errors
from seqdedupe.errors import error
from seqdedupe.v1 import admin_pb2

Told = Callable[[list[admin_pb2.BackupResponse]], None]


async def make(
    calls: Calls, processes: list[str], request: admin_pb2.BackupRequest, told: Told
) -> list[admin_pb2.BackupResponse]:
    """See `Admin.backup`. Without `processes` there is one, which is that of the client's first address."""
    check_not_forked()
    so_far: dict[int, admin_pb2.BackupResponse] = {}

    async def one(number: int, sidecar: Connection) -> admin_pb2.BackupResponse:
        last = admin_pb2.BackupResponse()
        with typed_errors(sidecar.address):
            async for last in sidecar.admin.Backup(request):
                so_far[number] = last
                told(list(so_far.values()))
        if not last.directory:
            raise error("OUTCOME_UNKNOWN", f"the sidecar at {sidecar.address} did not say that its backup is whole")
        return last

    connections = [calls.connection_to(address) for address in processes] or [calls.first_connection()]
    work = [asyncio.ensure_future(one(number, connection)) for number, connection in enumerate(connections)]
    try:
        return await asyncio.gather(*work)
    finally:
        # Where one has failed the others are given up.
        for task in work:
            task.cancel()
        await asyncio.gather(*work, return_exceptions=True)
