"""The broker of `examples/broker` on a disk that has no room for every fifth group: half of it is written."""

import errno
import itertools

from examples.broker import broker

if __name__ == "__main__":
    write = broker.FileLog._write
    groups = itertools.count(1)

    def write_or_not(self: broker.FileLog, data: bytes) -> None:
        if next(groups) % 5:
            write(self, data)
        else:
            write(self, data[: len(data) // 2])
            raise OSError(errno.ENOSPC, "no space left on device")

    broker.FileLog._write = write_or_not  # type: ignore[method-assign]
    broker.main()
