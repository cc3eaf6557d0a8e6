"""Kernels: plain loops over arrays, compiled where numba is installed.

A kernel is written once, as annotated Python that numba understands. With numba (the sidecar has it) the kernel is
compiled when its module is imported, for the types in its annotations. Without numba the plain function is the kernel.
The tests import this package a second time without numba, as their oracle.

Compiling all kernels takes seconds. A program that starts often sets a folder for the compiled kernels before the
import (`keep_compiled`). Without such a folder, nothing is written. A program that cannot wait calls `compile_later`:
then a kernel is the plain function until `compile_now` has compiled it. Callers of the kernel do not notice.
"""

import inspect
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import numpy as np
import numpy.typing as npt

F = TypeVar("F", bound=Callable[..., Any])

# Types that a kernel takes and returns, in addition to int and bool.
Bytes = Annotated[npt.NDArray[np.uint8], "what was received or read: nobody may change it"]
Uint8s = npt.NDArray[np.uint8]
Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Int64s2 = Annotated[npt.NDArray[np.int64], "of two dimensions"]
# The numbers may begin anywhere in a buffer, so they may not be aligned. Any contiguous array of these numbers is
# accepted.
Int32Column = Annotated[npt.NDArray[np.int32], "nobody may change it"]
Int64Column = Annotated[npt.NDArray[np.int64], "nobody may change it"]

# -- Functions that kernels call. numba compiles each of them as defined below.

_MASK64 = 2**64 - 1


def _signed(a: int) -> int:
    return (a + 2**63 & _MASK64) - 2**63


def load32(raw: Any, at: int) -> int:
    """Return the signed 32-bit little-endian number at this place of a buffer."""
    return int.from_bytes(bytes(raw[at : at + 4]), "little", signed=True)


def load64(raw: Any, at: int) -> int:
    """Return the signed 64-bit little-endian number at this place of a buffer."""
    return int.from_bytes(bytes(raw[at : at + 8]), "little", signed=True)


def view32(raw: Any, at: int, count: int) -> Int32Column:
    """Return `count` signed 32-bit little-endian numbers from this place of a buffer on."""
    return np.frombuffer(raw, "<i4", count, at) if count else np.zeros(0, np.int32)


def view64(raw: Any, at: int, count: int) -> Int64Column:
    """Return `count` signed 64-bit little-endian numbers from this place of a buffer on."""
    return np.frombuffer(raw, "<i8", count, at) if count else np.zeros(0, np.int64)


def copy(target: Any, at: int, raw: Any, begin: int, count: int) -> None:
    """Copy `count` bytes from the place `begin` of one buffer to the place `at` of another buffer."""
    target[at : at + count] = raw[begin : begin + count]


def element(array: Any, at: int) -> Any:
    """Return this element of an array of numbers. The element's index must not be negative."""
    return array[at]


def prefetch(array: Any, at: int) -> None:
    """Hint that this element of an array of numbers will be needed soon."""


def add64(a: int, b: int) -> int:
    """Return the sum of two signed 64-bit numbers. It overflows as in the processor."""
    return _signed(int(a) + int(b))


def shl64(a: int, bits: int) -> int:
    """Return a signed 64-bit number shifted to the left. Bits shifted out are lost."""
    return _signed(int(a) << bits)


def rotl64(a: int, bits: int) -> int:
    """Return a signed 64-bit number rotated to the left, by 1 to 63 bits."""
    return _signed(int(a) << bits | (int(a) & _MASK64) >> (64 - bits))


crc_step: Any = None
"""CRC32C of eight more bytes as one instruction of the processor; None if there is no such instruction. It is for
kernels that are compiled at once: Python cannot call it."""


# -- Compiling.

try:
    import numba
    from llvmlite import binding, ir
    from numba import njit
    from numba.core import cgutils, types
    from numba.extending import intrinsic, lower_builtin, register_jitable, type_callable
    from numba.np import arrayobj
except ImportError:

    def keep_compiled(folder: Path) -> None:
        """Do nothing: there is nothing to compile."""

    def compile_later() -> None:
        """Do nothing: there is nothing to compile."""

    def compile_now(goes_on: Callable[[], bool] = lambda: True) -> None:
        """Do nothing: there is nothing to compile."""

    def plain_kernels() -> int:
        """Return 0: no kernel waits to be compiled."""
        return 0

    def kernel(
        *, inline: bool = False, nogil: bool = False, bare: bool = False, at_once: bool = False
    ) -> Callable[[F], F]:
        """Leave the function as it is."""
        return lambda function: function

    def for_kernels(function: F) -> F:
        """Leave the function as it is."""
        return function

else:
    _TYPES = {
        int: types.int64,
        bool: types.boolean,
        Bytes: types.Array(types.uint8, 1, "C", readonly=True),
        Uint8s: types.Array(types.uint8, 1, "C"),
        Int32s: types.Array(types.int32, 1, "C"),
        Int64s: types.Array(types.int64, 1, "C"),
        Int64s2: types.Array(types.int64, 2, "C"),
        Int32Column: types.Array(types.int32, 1, "C", readonly=True, aligned=False),
        Int64Column: types.Array(types.int64, 1, "C", readonly=True, aligned=False),
    }

    _is_kept = False

    _is_later = False
    """Whether kernels of modules that are imported now are plain functions for the time being."""

    _plain_kernels: deque[tuple[Any, Any]] = deque()
    """The kernels that are still to be compiled, in the order in which they may call each other, and their types."""

    def keep_compiled(folder: Path) -> None:
        """For modules that are imported from now on, store compiled kernels in this folder, and load them from this
        folder.

        numba unpickles the files in the folder, so no other user may be able to write to the folder.
        """
        global _is_kept
        numba.config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
        _is_kept = True

    def compile_later() -> None:
        """For modules that are imported from now on, do not compile the kernels before `compile_now`. Plain functions
        have the same results, but are up to a hundred times slower."""
        global _is_later
        _is_later = True

    def compile_now(goes_on: Callable[[], bool] = lambda: True) -> None:
        """Compile the kernels that are still plain functions, or load them from their folder. Stop when `goes_on()` is
        false. This may run in a separate thread. A call of a kernel during this time runs either the plain function or
        the compiled function.

        Raises the errors of numba, LLVM and the file system. After an error, this kernel and all later kernels stay
        plain functions.
        """
        global _is_later
        _is_later = False
        while _plain_kernels and goes_on():
            dispatcher, signature = _plain_kernels[0]
            dispatcher.compile(signature)
            dispatcher.disable_compile()
            del dispatcher._compile_for_args
            _plain_kernels.popleft()

    def plain_kernels() -> int:
        """Return the number of kernels that are plain functions until `compile_now` has compiled them."""
        return len(_plain_kernels)

    def kernel(
        *, inline: bool = False, nogil: bool = False, bare: bool = False, at_once: bool = False
    ) -> Callable[[F], F]:
        """Compile the function for the types in its annotations.

        - `bare`: the function neither makes nor returns arrays, and counts no references to its array arguments.
          Without `bare`, each array argument of a function called in a loop can cost two locked instructions per
          iteration.
        - `inline` inlines the function into the kernels that call it. Use `inline` for parts of short kernels, where
          the cost of a call matters.
        - `nogil` lets other Python threads run at the same time. Use `nogil` for long work in a separate thread.
        - `at_once` compiles the function now, even after `compile_later`. Use `at_once` for work on every byte, where a
          plain function takes seconds.
        """

        def compiled(function: F) -> F:
            hints = get_type_hints(function, include_extras=True)
            returned = hints.pop("return")
            signature = _TYPES[returned](*(_TYPES[hint] for hint in hints.values()))
            options: Any = {
                "forceinline": inline,
                "nogil": nogil,
                "_nrt": not bare,
                "error_model": "numpy",
                "no_cfunc_wrapper": True,
            }
            if not _is_later or at_once or numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
                return cast(F, njit(signature, cache=_is_kept, **options)(function))
            dispatcher: Any = njit(cache=_is_kept, **options)(function)
            plain = _plain(function, [hint is int for hint in hints.values()], returned)
            # If nothing is compiled for the argument types, numba asks for a function to call.
            dispatcher._compile_for_args = lambda *arguments: plain
            _plain_kernels.append((dispatcher, signature))
            return cast(F, dispatcher)

        return compiled

    def _plain(function: Any, are_ints: list[bool], returned: Any) -> Callable[..., Any]:
        """Return a wrapper that calls the function with Python's numbers instead of numpy's numbers, which can
        overflow."""

        def called(*arguments: Any) -> Any:
            result = function(
                *(int(value) if is_int else value for value, is_int in zip(arguments, are_ints, strict=True))
            )
            return returned(result) if returned in (int, bool) else result

        return called

    def for_kernels(function: F) -> F:
        """Let kernels call this plain function. The function is compiled into the kernels, and stays plain for all
        other callers."""
        plain: F = register_jitable(function)
        return plain

    def _in_kernels(function: Any, definition: Callable[..., Any]) -> None:
        """Put the code that the definition generates into the kernels that call this plain function. The result is like
        a numba intrinsic that Python can also call."""

        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            return definition(*signature.args)[1](context, builder, signature, arguments)

        def typed(*arguments):  # type: ignore[no-untyped-def]
            return definition(*arguments)[0]

        typed.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
        type_callable(function)(lambda context: typed)
        lower_builtin(function, types.VarArg(types.Any))(generate)  # type: ignore[no-untyped-call]

    def _load(bits: int) -> Any:
        # One unaligned load. Composing the number from bytes would cost compile time in every kernel.
        def load(raw, at):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                array = context.make_array(signature.args[0])(context, builder, arguments[0])
                place = builder.gep(array.data, [arguments[1]])
                loaded = builder.load(builder.bitcast(place, ir.IntType(bits).as_pointer()))
                loaded.align = 1
                return builder.sext(loaded, ir.IntType(64)) if bits < 64 else loaded

            return types.int64(raw, types.int64), generate

        return load

    _in_kernels(load32, _load(32))
    _in_kernels(load64, _load(64))

    def _view(column: Any) -> Any:
        # The result uses the same memory. If the buffer were sliced and viewed as numbers, numba would assume that the
        # numbers are aligned.
        def view(raw, at, count):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                array = context.make_array(signature.args[0])(context, builder, arguments[0])
                result = context.make_array(column)(context, builder)
                item_bytes = ir.Constant(ir.IntType(64), column.dtype.bitwidth // 8)
                arrayobj.populate_array(  # type: ignore[no-untyped-call]
                    result,
                    data=builder.bitcast(builder.gep(array.data, [arguments[1]]), result.data.type),
                    shape=[arguments[2]],
                    strides=[item_bytes],
                    itemsize=item_bytes,
                    meminfo=None,
                )
                return result._getvalue()

            return column(raw, types.int64, types.int64), generate

        return view

    _in_kernels(view32, _view(_TYPES[Int32Column]))
    _in_kernels(view64, _view(_TYPES[Int64Column]))

    def _copy(target, at, raw, begin, count):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            into = context.make_array(signature.args[0])(context, builder, arguments[0])
            of = context.make_array(signature.args[2])(context, builder, arguments[2])
            to_place, from_place = builder.gep(into.data, [arguments[1]]), builder.gep(of.data, [arguments[3]])
            cgutils.raw_memcpy(builder, to_place, from_place, arguments[4], 1)  # type: ignore[no-untyped-call]
            return context.get_dummy_value()

        return types.void(target, types.int64, raw, types.int64, types.int64), generate

    # A loop over bytes checks each index for being negative, which takes ten times as long.
    _in_kernels(copy, _copy)

    def _element(array, at):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            of = context.make_array(signature.args[0])(context, builder, arguments[0])
            return builder.load(builder.gep(of.data, [arguments[1]]))

        return array.dtype(array, types.int64), generate

    # Normal indexing checks for a negative index, too.
    _in_kernels(element, _element)

    def _prefetch(array, at):  # type: ignore[no-untyped-def]
        def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
            of = context.make_array(signature.args[0])(context, builder, arguments[0])
            place = builder.bitcast(builder.gep(of.data, [arguments[1]]), cgutils.voidptr_t)
            int32 = ir.IntType(32)
            function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
                builder.module, ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t] + [int32] * 3), "llvm.prefetch.p0"
            )
            # Prefetch for a read, into all caches, of data.
            builder.call(function, [place, *(ir.Constant(int32, value) for value in (0, 3, 1))])
            return context.get_dummy_value()

        return types.void(array, types.int64), generate

    _in_kernels(prefetch, _prefetch)

    def _of_int64s(operation: Callable[..., Any]) -> Any:
        def of_two(_a, _b):  # type: ignore[no-untyped-def]
            def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
                return operation(builder, *arguments)

            return types.int64(types.int64, types.int64), generate

        return of_two

    def _rotated(builder, a, bits):  # type: ignore[no-untyped-def]
        rest = builder.sub(ir.Constant(ir.IntType(64), 64), bits)
        return builder.or_(builder.shl(a, bits), builder.lshr(a, rest))

    _in_kernels(add64, _of_int64s(lambda builder, a, b: builder.add(a, b)))
    _in_kernels(shl64, _of_int64s(lambda builder, a, bits: builder.shl(a, bits)))
    _in_kernels(rotl64, _of_int64s(_rotated))

    def _crc_step(typing_context, crc, word):  # type: ignore[no-untyped-def]
        def generate(builder, crc, word):  # type: ignore[no-untyped-def]
            int64 = ir.IntType(64)
            function = cgutils.get_or_insert_function(  # type: ignore[no-untyped-call]
                builder.module, ir.FunctionType(int64, [int64, int64]), "llvm.x86.sse42.crc32.64.64"
            )
            return builder.call(function, [crc, word])

        return _of_int64s(generate)(crc, word)

    # Settings that make numba compile for another processor leave this instruction unused.
    _IS_FOR_THIS_PROCESSOR = not (numba.config.CPU_NAME or numba.config.CPU_FEATURES)  # type: ignore[attr-defined]
    if _IS_FOR_THIS_PROCESSOR and binding.get_host_cpu_features().get("sse4.2", False):
        crc_step = intrinsic(_crc_step)
