"""Triton's interpreter made quick: calls, reductions, and all of it where coverage is measured.

A reduction by a kernel's own function calls that function once for every element, through all of
Triton's checks: a running maximum over 128 keys of 128 rows is sixteen thousand calls. The function
combines tensors as well as numbers, so one call for each place along the axis gives the same, in
the same order. At every call of a function the interpreter looks through all that the language has,
for what it must replace, which was a third of its time. Half of what is left it spends on checks
whose result nobody hears of, and on descriptions of shapes. And watched: what kernels read and
write outside of their tensors.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np


def make_quick() -> None:
    """Have the interpreter of this process do all of it but what coverage asks for."""
    reduce_by_slices()
    replace_once()
    remember_types()
    remember_shapes()
    spare_unheard_checks()


def pause_tracing() -> None:
    """Have what measures coverage look away while this process interprets a kernel.

    It is asked at every line of the interpreter, too, which takes as long again as interpreting.
    """
    from triton.runtime.interpreter import GridExecutor

    interpret = GridExecutor.__call__

    def untraced(self: Any, *args: Any, **kwargs: Any) -> Any:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return interpret(self, *args, **kwargs)
        finally:
            sys.settrace(trace)

    GridExecutor.__call__ = untraced


def replace_once() -> None:
    """Have the interpreter of this process replace the language once for each run of a kernel.

    What it puts in depends on nothing but which of the language's modules a function sees, and
    stays until the run ends: for the next function that sees the same ones, all is there.
    """
    from triton.runtime import interpreter

    replace, interpret = interpreter._patch_lang, interpreter.GridExecutor.__call__
    language = (interpreter.tl, interpreter.tl.core)
    replaced: set[tuple[bool, ...]] = set()

    @functools.cache
    def seen_by(function: Any) -> tuple[bool, ...]:
        names = function.__globals__.values()
        return tuple(any(one is module for one in names) for module in language)

    def once(function: Any) -> Any:
        seen = seen_by(function)
        if seen in replaced:
            return None
        replaced.add(seen)
        return replace(function)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        # the run before has put back what it replaced.
        replaced.clear()
        return interpret(self, *args, **kwargs)

    interpreter._patch_lang = once
    interpreter.GridExecutor.__call__ = run


def remember_types() -> None:
    """Have the interpreter of this process look up a type's numpy type once.

    It makes the whole table anew for every tensor.
    """
    from triton.runtime import interpreter

    look_up, known = interpreter._get_np_dtype, dict[str, Any]()

    def remembered(dtype: Any) -> Any:
        found = known.get(dtype.name)
        if found is None:
            found = known[dtype.name] = look_up(dtype)
        return found

    interpreter._get_np_dtype = remembered


def spare_unheard_checks() -> None:
    """Have the interpreter of this process leave out what it computes for nobody.

    Of every sum, difference and product of whole numbers it computes, in 64 bits, whether it fits:
    a third of its time, for an assertion that it makes in its mode for debugging alone.
    """
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)


def remember_shapes() -> None:
    """Have the interpreter of this process make a shape's description once.

    It makes one for every tensor and every type, and spells each out.
    """
    from triton.language import core

    describe, begin = core.block_type.__init__, core.tensor.__init__
    described: dict[tuple[str, tuple[int, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        # pointers of one name may still differ.
        if type(element_ty) is not core.dtype:
            return describe(self, element_ty, shape)
        key = element_ty.name, tuple(core._unwrap_shape(shape))
        if key not in described:
            describe(self, element_ty, shape)
            described[key] = dict(vars(self))
        else:
            vars(self).update(described[key])
        return None

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes not in shapes:
            begin(self, handle, type)
            shapes[sizes] = self.numel, self.shape
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = shapes[sizes]

    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor


def reduce_by_slices() -> None:
    """Have the interpreter of this process combine whole slices at once."""
    from triton.runtime.interpreter import ReduceOps

    # a version of Triton that has it no more is to be noticed.
    assert callable(ReduceOps.generic_reduce)
    ReduceOps.generic_reduce = generic_reduce


def generic_reduce(self: Any, given: tuple[Any, ...]) -> list[Any]:
    """Stands in for ``ReduceOps.generic_reduce``."""
    tensors, axis = self.unravel(given, self.axis)
    dtypes = [tensor.dtype for tensor in tensors]
    data = [np.moveaxis(tensor.handle.data, axis, 0) for tensor in tensors]
    total = [x[0] for x in data]
    for place in range(1, len(data[0])):
        pieces = (*total, *(x[place] for x in data))
        combined = self.combine_fn.fn(
            *(self.to_tensor(x, dtype) for x, dtype in zip(pieces, 2 * dtypes, strict=True))
        )
        made = combined if isinstance(combined, tuple) else (combined,)
        # of scalars the interpreter makes arrays of one element.
        total = [x.handle.data.reshape(total[0].shape) for x in made]
    if self.keep_dims:
        shape = [1] * given[0].handle.data.ndim
        if self.axis is not None:
            shape = list(given[0].handle.data.shape)
            shape[axis] = 1
        total = [x.reshape(shape) for x in total]
    elif self.axis is None:
        total = [x.item() for x in total]
    return [self.to_tensor(x, dtype) for x, dtype in zip(total, dtypes, strict=True)]


@contextmanager
def only_inside() -> Iterator[list[str]]:
    """Note, in the list that it gives, what interpreted kernels read or write outside of tensors.

    That is outside of all the tensors that the kernel was given. Nothing is read or written there.
    """
    from triton.runtime.interpreter import GridExecutor, interpreter_builder

    begin, load, store = (
        GridExecutor._init_args_hst,
        interpreter_builder.create_masked_load,
        interpreter_builder.create_masked_store,
    )
    given: list[tuple[int, int]] = []
    found: list[str] = []

    def begun(self: Any, args: Any, kwargs: Any) -> Any:
        made, named = begin(self, args, kwargs)
        given[:] = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in made if hasattr(x, "data_ptr")]
        return made, named

    def inside(what: str, pointers: Any, mask: Any) -> Any:
        first = pointers.data.astype(np.int64)
        last = first + pointers.get_element_ty().primitive_bitwidth // 8
        right = np.zeros(first.shape, bool)
        for start, end in given:
            right |= (first >= start) & (last <= end)
        wrong = mask.data & ~right
        if wrong.any():
            found.append(f"{what} at {int(wrong.sum())} places outside")
        return type(mask)(mask.data & right, mask.dtype)

    def loaded(pointers: Any, mask: Any, *more: Any) -> Any:
        return load(pointers, inside("reads", pointers, mask), *more)

    def stored(pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        return store(pointers, value, inside("writes", pointers, mask), *more)

    with (
        mock.patch.object(GridExecutor, "_init_args_hst", begun),
        mock.patch.object(interpreter_builder, "create_masked_load", loaded),
        mock.patch.object(interpreter_builder, "create_masked_store", stored),
    ):
        yield found
