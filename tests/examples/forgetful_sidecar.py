"""A sidecar that forgets what it is replayed. The control arm of the crash tests."""

import sys
from typing import Any

from broker_sidecar import kernels

if __name__ == "__main__":
    kernels.prepare()

    from broker_sidecar.__main__ import main
    from seqdedupe.core import ranges

    def forget(handles: Any, *_: Any) -> int:
        return len(handles)

    ranges.replay_ranges = forget
    sys.exit(main())
