"""The layout of bytes: the offsets of the parts of a batch and of a record. No other package computes such offsets.

Begin with `layout`, which finds the columns of a batch. `headers` and `records` handle records in a log, and `journal`
handles the log's journal. `jit` compiles all kernels. Without numba, the kernels stay plain functions.
"""
