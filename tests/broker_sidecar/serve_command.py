"""`seqdedupe serve`, for a `Sidecar` that runs modules."""

import sys

from seqdedupe.cli.main import main

MODULE = "tests.broker_sidecar.serve_command"

if __name__ == "__main__":
    sys.argv[1:1] = ["serve"]
    main()
