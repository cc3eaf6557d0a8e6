"""Bytes: where the parts of a batch and of a record stand. Nobody else counts places.

Begin with `columns`, which finds the columns of a batch. `headers` and `records` are about records in a log, `journal`
about its journal. `jit` compiles all kernels, or leaves them as they are where numba is not installed.
"""
