"""Bytes: the places of the parts of a batch and of a record. No other package computes places.

Begin with `columns`, which finds the columns of a batch. `headers` and `records` are about records in a log, `journal`
about the log's journal. `jit` compiles all kernels. Without numba, the kernels stay plain functions.
"""
