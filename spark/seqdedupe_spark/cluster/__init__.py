"""Reading straight from Pulsar's brokers, without the sidecar: what one has written there, and what none has.

Begin with `cluster_client`, which planning asks instead of a sidecar, or with `broker_reader`, which reads a range in a
worker: a sidecar's topic itself, any other by `stock_reader`. All use a `broker_connection`. All of this needs packages
of its own, and is imported only where it is used.
"""


def prepare() -> None:
    """To be called before anything in this folder is imported. Raises ImportError if packages for it are missing.

    Kernels are compiled once on a machine: every Python process of Spark's would take seconds for them.
    """
    from broker_sidecar import kernels

    kernels.prepare()
