"""Reading directly from Pulsar's brokers, without a sidecar: topics that a sidecar has written, and all other topics.

Begin with `cluster_client`, which planning uses instead of a sidecar's client, and which reads a range in a worker.
`cluster_client` itself reads topics that a sidecar has written, and uses `stock_reader` for other topics. Both modules
use a `broker_connection`. This folder needs additional packages, and is imported only where it is used.
"""


def prepare() -> None:
    """Prepare the imports of this folder. Raises ImportError if packages are missing.

    Kernels are compiled once on a machine. Otherwise every Python process of Spark would compile the kernels, which
    takes seconds.
    """
    from broker_sidecar import kernels

    kernels.prepare()
