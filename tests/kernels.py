"""`python -m tests.kernels MODULE ARGUMENTS…` runs a module with the kernels that the sidecar keeps compiled."""

import runpy
import sys

from broker_sidecar import kernels

if __name__ == "__main__":
    kernels.prepare()
    sys.argv = sys.argv[1:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
