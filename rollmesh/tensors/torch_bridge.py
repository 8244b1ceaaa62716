"""torch at the edge of the plane: a tensor's bytes, and a tensor of bytes that nobody may change.

Owns the names of dtypes and ReadOnlyTensor. Invariants: bytes go through unread, whatever the
dtype; nothing is copied here that lies in memory in one piece; what a consumer gets cannot be
written to by way of torch's functions, since others of its process see the same memory. This is
the only module of the room that imports torch; driven by plane.py.

What torch does in C++ without asking is out of reach: `parameter.data = x`, `y.set_(x)`, an output
of `all_gather` and its kind (before torch 2.13 of any collective), a DTensor of it, TorchScript,
`vmap`, a view that a compiled function made, `torch.from_numpy(x.numpy())`. What writes there
should get a `clone()`.
"""

import functools
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import msgspec
import numpy as np
import torch

from rollmesh.core.errors import TensorError
from rollmesh.tensors.handles import Content

_INPLACE_OPERATORS = frozenset(
    f"__i{operator}__"
    for operator in (
        "add", "and", "div", "floordiv", "lshift", "matmul", "mod", "mul", "or", "pow", "rshift",
        "sub", "truediv", "xor",
    )
) | {"__setitem__"}  # fmt: skip
_SETS_A_FLAG = frozenset({"requires_grad_"})
_COLLECTIVES = "torch.distributed.distributed_c10d"
_ONLY_SENDS = frozenset({"send", "isend"})

Tensor = torch.Tensor
"""What is stored: any tensor of torch."""

_NUMPYS = frozenset({
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
})  # fmt: skip
"""Dtypes that torch and numpy both have, under one name."""


class _Kind(msgspec.Struct, frozen=True, gc=False):
    """A dtype on both sides."""

    name: str
    dtype: torch.dtype
    is_numpys: bool
    twin: torch.dtype
    """As wide, and numpy's too: the dtype itself, or whole numbers for what numpy lacks."""
    in_numpy: np.dtype[Any]
    """The twin."""
    item_bytes: int


_kinds: dict[str, _Kind] = {}

with warnings.catch_warnings():
    # torch warns once in a process that it knows no read-only memory, which is what the class
    # below is for. This is that once.
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


class ReadOnlyTensor(torch.Tensor):
    """A tensor of memory that others read, too.

    It is a tensor like any other, but that an operation in place, or an `out=` that names it, is a
    TensorError. What shares its memory (`x[0]`, `x.view(...)`, `x.detach()`, `x.numpy()`) is
    read-only as well; what is computed from it is a plain tensor, and so is a `clone()`, a
    pickled copy, or what `to(device)` made.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Every function of torch that gets one of us comes by here."""
        if not all(issubclass(cls, each) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        if _writes_first(func, args, kwargs):
            raise _refusal(_name(func))
        if torch.compiler.is_compiling():
            return _plainly(func, *args, **kwargs)  # a trace holds no memory to ask about
        if _writes_elsewhere(func, args, kwargs):
            raise _refusal(_name(func))
        if func is torch.Tensor.__dlpack__:
            # It hands out a pointer, and cannot say that nobody may write there.
            return func(_plain(args[0]).clone(), *args[1:], **kwargs)
        result = _plainly(func, *args, **kwargs)
        return _guarded(result, (*args, *kwargs.values()))

    def __setattr__(self, name: str, value: Any) -> None:
        # These are a copy into the memory, of which torch does not ask the class.
        if name in ("real", "imag"):
            raise _refusal(f"setting .{name}")
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        own = _plain(self).detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = own
        return own

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Only what is seen of the memory travels, and who gets it owns it.
        return _plain(self).detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # is torch's


def to_content(tensor: torch.Tensor) -> Content:
    """The tensor's bytes: its own memory where it lies in one piece on the host, else a copy.

    TensorError where it has no bytes of its own: a sparse, quantized, meta or distributed one.
    """
    tensor = _plain(tensor)
    if not _is_dense(tensor):
        what = f"a {type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, {tensor.device.type})"
        raise TensorError(f"{what} cannot be stored: make it a dense tensor of one device first")
    kind = _kind(str(tensor.dtype).removeprefix("torch."))
    alike = tensor
    if not kind.is_numpys:
        alike = tensor.detach().resolve_conj().view(kind.twin)
    # By force: detached, on the host, without a conjugation that is still to be done.
    array = alike.contiguous().numpy(force=True)
    data = array.reshape(-1).view(np.uint8)
    data.setflags(write=False)
    return Content(kind.name, tuple(tensor.shape), data)


def to_tensor(content: Content) -> ReadOnlyTensor:
    """The tensor of these bytes, on the same memory, which it keeps alive; TensorError where dtype,
    shape and bytes do not fit each other."""
    kind, shape, data = _kind(content.dtype), content.shape, content.data
    if math.prod(shape) * kind.item_bytes != data.nbytes:
        what = f"{content.dtype} {list(shape)}"
        raise TensorError(f"{data.nbytes} bytes are not a tensor of {what}")
    # Whatever it is made by, it refers to this very array: numpy's view of a view would not.
    is_view = isinstance(data.base, np.ndarray)
    array = np.frombuffer(data.data, kind.in_numpy) if is_view else data.view(kind.in_numpy)
    tensor = torch.from_numpy(array)
    if not kind.is_numpys:
        tensor = tensor.view(kind.dtype)
    if len(shape) != 1:
        tensor = tensor.view(shape)
    # It is ours alone so far; `as_subclass` would make another, for as much as all of the above.
    tensor.__class__ = ReadOnlyTensor
    return tensor  # type: ignore[return-value]  # it is one by now


def _is_dense(tensor: torch.Tensor) -> bool:
    # Wrappers of other tensors (DTensor, jagged ones) answer each operation themselves.
    is_wrapper = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    is_strided = tensor.layout is torch.strided and not tensor.is_quantized
    return is_strided and not tensor.is_meta and not is_wrapper


def _kind(name: str) -> _Kind:
    kind = _kinds.get(name)
    if kind is None:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise TensorError(f"this torch ({torch.__version__}) knows no dtype {name!r}")
        is_numpys, num_bytes = name in _NUMPYS, dtype.itemsize
        twin = name if is_numpys else f"int{8 * num_bytes}"
        in_torch = getattr(torch, twin)
        kind = _Kind(name, dtype, is_numpys, in_torch, np.dtype(twin), num_bytes)
        _kinds[name] = kind
    return kind


def _plainly(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of torch as if ours were plain tensors."""
    with torch._C.DisableTorchFunctionSubclass():  # noqa: SLF001 - has no public name
        return func(*args, **kwargs)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, ReadOnlyTensor):
        tensor = _plainly(torch.Tensor.as_subclass, tensor, torch.Tensor)
    return tensor


def _refusal(what: str) -> TensorError:
    line = f"{what} would write to a read-only tensor, which others of this process may be reading"
    return TensorError(f"{line}: clone() it first")


def _name(func: Callable[..., Any]) -> str:
    # An overload of torch.ops.aten is called add_.Tensor.
    return getattr(func, "__name__", "").partition(".")[0]


def _writes_first(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call would write to one of us that is its `out` or, by torch's rule for names,
    its first argument. Dynamo traces this."""
    if kwargs and _any_of_ours(kwargs.get("out")):
        return True
    if _is_in_place(func) or (kwargs and kwargs.get("inplace")):
        return _any_of_ours(next(iter((*args, *kwargs.values()))))
    return False


def _is_in_place(func: Callable[..., Any]) -> bool:
    return _has_name_in_place(func)


# What torch.compiler.assume_constant_result does, which imports all of Dynamo: 2.5 s.
_is_in_place._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - see above


@functools.lru_cache(maxsize=4096)
def _has_name_in_place(func: Callable[..., Any]) -> bool:
    name = _name(func)
    ends_so = name.endswith("_") and not name.endswith("__")
    return (ends_so and name not in _SETS_A_FLAG) or name in _INPLACE_OPERATORS


def _writes_elsewhere(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether the call would write to one of us that only torch's signature, or the function's
    meaning, tells."""
    if getattr(func, "__module__", "") == _COLLECTIVES:
        return _any_of_ours(_received(func, args, kwargs))
    return any(
        _any_of_ours(args[place] if place < len(args) else kwargs.get(name))
        for place, name in _written_arguments(func)
    )


def _received(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a collective writes to, here; torch passes what it sends and receives by place."""
    name = _name(func)
    if name in _ONLY_SENDS or (name == "broadcast" and _is_source(**kwargs)):
        return None
    return kwargs["gather_list"] if name == "gather" else args[0]


def _is_source(
    src: int | None = None, group: Any = None, group_src: int | None = None, **_: Any
) -> bool:
    distributed = torch.distributed
    if group_src is not None:
        return distributed.get_rank(group) == group_src
    return distributed.get_rank() == (src or 0)


@functools.lru_cache(maxsize=4096)
def _written_arguments(func: Callable[..., Any]) -> tuple[tuple[int, str], ...]:
    """By the schema that an operator has, torch's or another library's: (place, name)."""
    return tuple(
        (sys.maxsize if argument.kwarg_only else place, argument.name)
        for schema in _schemas(func)
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


def _schemas(func: Callable[..., Any]) -> list[Any]:
    if isinstance(func, torch._ops.OpOverloadPacket):  # noqa: SLF001 - has no public name
        overloads = func.overloads()  # type: ignore[no-untyped-call]  # is torch's
        return [getattr(func, name)._schema for name in overloads]  # noqa: SLF001 - as above
    return [func._schema] if isinstance(func, torch._ops.OpOverload) else []  # noqa: SLF001 - as above


def _any_of_ours(value: Any) -> bool:
    return any(True for _ in _ours([value]))


def _ours(values: Iterable[Any]) -> Iterator[ReadOnlyTensor]:
    for value in values:
        if isinstance(value, ReadOnlyTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _ours(value)


def _guarded(result: Any, values: tuple[Any, ...]) -> Any:
    """What a function gave: read-only where it shares the memory of one of us."""
    if isinstance(result, np.ndarray):
        result.flags.writeable = False
        return result
    if isinstance(result, list | tuple):
        if not any(isinstance(each, torch.Tensor) for each in result):
            return result
        return type(result)([_guarded(each, values) for each in result])
    if type(result) is torch.Tensor and _shares_memory(result, values):
        return result.as_subclass(ReadOnlyTensor)
    return result


def _shares_memory(result: torch.Tensor, values: tuple[Any, ...]) -> bool:
    try:
        memory = result.untyped_storage().data_ptr()
    except NotImplementedError:
        return False  # a sparse one, or what torch.func passes around: all have memory of their own
    storages = (_plainly(torch.Tensor.untyped_storage, each) for each in _ours(values))
    return any(each.data_ptr() == memory for each in storages)
