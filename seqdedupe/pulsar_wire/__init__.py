"""Pulsar's binary protocol, for a writer of entries, its reader, and a server that stock Pulsar producers connect to.

Begin with `frames`, which divides a byte stream into commands and entries, and contains the compression codecs.
`batches` handles the rows of an entry. Both modules are pure. `connection` is a connection to a broker.
`pulsar_api_pb2` is generated.
"""
