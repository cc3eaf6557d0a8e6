"""A pytest plugin (`-p tests.plain_kernels`): every kernel is the plain function that a first start serves with before
it is compiled."""

from seqdedupe.format import jit

jit.compile_later()
