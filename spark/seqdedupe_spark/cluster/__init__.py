"""Reading straight from Pulsar's brokers, without the sidecar: topics that a sidecar has written, and all others.

Begin with `cluster_client`, which planning asks instead of a sidecar, or with `broker_reader`, which reads a range in a
worker. It reads a sidecar's topic itself, and any other with `stock_reader`. All use a `broker_connection`. This folder
needs additional packages, and is imported only where it is used.
"""


def prepare() -> None:
    """Prepare the imports of this folder. Raises ImportError if packages for it are missing.

    Kernels are compiled once on a machine. Otherwise every Python process of Spark would take seconds for them.
    """
    from broker_sidecar import kernels

    kernels.prepare()
