"""Kernels that are compiled once on a machine: every Python process of Spark's would take seconds for them."""


def prepare() -> None:
    """To be called before what reads from brokers is imported. Raises ImportError if packages for it are missing."""
    from broker_sidecar import kernels

    kernels.prepare()
