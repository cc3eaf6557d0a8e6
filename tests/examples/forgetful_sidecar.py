"""A sidecar that forgets what it is replayed. The control arm of the crash tests."""

import sys

from broker_sidecar import kernels

if __name__ == "__main__":
    kernels.prepare()

    from broker_sidecar.__main__ import main
    from seqdedupe.topic.attached import BrokerAttachment, Columns

    confirm = BrokerAttachment._confirm

    def confirm_what_is_reported(self: BrokerAttachment, columns: Columns) -> None:
        if self.is_ready:
            confirm(self, columns)

    BrokerAttachment._confirm = confirm_what_is_reported  # type: ignore[method-assign]
    sys.exit(main())
