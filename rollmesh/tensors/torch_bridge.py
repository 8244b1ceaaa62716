"""Convert between torch tensors and contents, and protect shared memory from writes.

- Bytes pass unread, whatever the dtype; a tensor that is contiguous on the host is not copied.
- A fetched tensor cannot be written by torch's functions, since others of its process use the same
  memory. This is the only module of the room that imports torch.
- Torch's C++ code that does not ask the class is out of reach: `parameter.data = x`, `y.set_(x)`,
  an output of `all_gather` and its kind (before torch 2.13 of any collective), a DTensor of it,
  TorchScript, `vmap`, a view made by a compiled function, `torch.from_numpy(x.numpy())`. Give code
  that writes there a `clone()`.
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
"""Any torch tensor."""

_NUMPYS = frozenset({
    "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
    "float16", "float32", "float64", "complex64", "complex128",
})  # fmt: skip
"""Dtypes that torch and numpy both have, under one name."""


class _Kind(msgspec.Struct, frozen=True, gc=False):
    """A dtype in torch and in numpy."""

    name: str
    dtype: torch.dtype
    is_numpys: bool
    twin: torch.dtype
    """A dtype of the same width that numpy has too: the same one, or integers for what numpy
    lacks."""
    in_numpy: np.dtype[Any]
    """The numpy dtype of `twin`."""
    item_bytes: int


_kinds: dict[str, _Kind] = {}

with warnings.catch_warnings():
    # torch warns once per process that it has no read-only memory, which the class below provides.
    # Trigger that warning here.
    warnings.simplefilter("ignore")
    torch.from_numpy(np.frombuffer(b"\0", np.uint8))


class ReadOnlyTensor(torch.Tensor):
    """A tensor in memory that others read too.

    It behaves like any tensor, except that an in-place operation or an `out=` on it raises
    TensorError. What shares its memory (`x[0]`, `x.view(...)`, `x.detach()`, `x.numpy()`) is
    read-only as well. Results computed from it are plain tensors, and so are a `clone()`, a pickled
    copy, and what `to(device)` made.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Called for every torch function with one of these tensors."""
        if not all(issubclass(cls, each) for each in types):
            return NotImplemented
        kwargs = kwargs or {}
        if _writes_first(func, args, kwargs):
            raise _refusal(_name(func))
        if torch.compiler.is_compiling():
            return _plainly(func, *args, **kwargs)  # a trace has no memory to check
        if _writes_elsewhere(func, args, kwargs):
            raise _refusal(_name(func))
        if func is torch.Tensor.__dlpack__:
            # It returns a pointer, and cannot make it read-only.
            return func(_plain(args[0]).clone(), *args[1:], **kwargs)
        result = _plainly(func, *args, **kwargs)
        return _guarded(result, (*args, *kwargs.values()))

    def __setattr__(self, name: str, value: Any) -> None:
        # These copy into the memory without asking the class.
        if name in ("real", "imag"):
            raise _refusal(f"setting .{name}")
        super().__setattr__(name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        own = _plain(self).detach().clone().requires_grad_(self.requires_grad)
        memo[id(self)] = own
        return own

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Only the visible part of the memory is pickled, and the receiver owns it.
        return _plain(self).detach().clone().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # is torch's


def to_content(tensor: torch.Tensor) -> Content:
    """Return the tensor's bytes: its own memory if it is contiguous on the host, else a copy.
    TensorError if it has no bytes of its own: a sparse, quantized, meta or distributed one."""
    tensor = _plain(tensor)
    if not _is_dense(tensor):
        what = f"a {type(tensor).__name__} ({tensor.layout}, {tensor.dtype}, {tensor.device.type})"
        raise TensorError(f"{what} cannot be stored: make it a dense tensor of one device first")
    kind = _kind(str(tensor.dtype).removeprefix("torch."))
    alike = tensor
    if not kind.is_numpys:
        alike = tensor.detach().resolve_conj().view(kind.twin)
    # force: detached, on the host, with a pending conjugation resolved.
    array = alike.contiguous().numpy(force=True)
    data = array.reshape(-1).view(np.uint8)
    data.setflags(write=False)
    return Content(kind.name, tuple(tensor.shape), data)


def to_tensor(content: Content) -> ReadOnlyTensor:
    """Return a tensor on the memory of the content, which it keeps alive; TensorError if dtype,
    shape and bytes do not match."""
    kind, shape, data = _kind(content.dtype), content.shape, content.data
    if math.prod(shape) * kind.item_bytes != data.nbytes:
        what = f"{content.dtype} {list(shape)}"
        raise TensorError(f"{data.nbytes} bytes are not a tensor of {what}")
    # The tensor must refer to this very array: numpy's view of a view would not.
    is_view = isinstance(data.base, np.ndarray)
    array = np.frombuffer(data.data, kind.in_numpy) if is_view else data.view(kind.in_numpy)
    tensor = torch.from_numpy(array)
    if not kind.is_numpys:
        tensor = tensor.view(kind.dtype)
    if len(shape) != 1:
        tensor = tensor.view(shape)
    # Set the class in place: `as_subclass` would create another tensor, for as much as all of the
    # above.
    tensor.__class__ = ReadOnlyTensor
    return tensor  # type: ignore[return-value] # its class was set above


def _is_dense(tensor: torch.Tensor) -> bool:
    # Wrappers of other tensors (DTensor, jagged ones) handle each operation themselves.
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
    """Call a torch function as if our tensors were plain."""
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
    # An overload in torch.ops.aten is called add_.Tensor.
    return getattr(func, "__name__", "").partition(".")[0]


def _writes_first(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether the call writes to one of our tensors that is its `out` or, by torch's naming
    rule, its first argument. Dynamo traces this."""
    if kwargs and _any_of_ours(kwargs.get("out")):
        return True
    if _is_in_place(func) or (kwargs and kwargs.get("inplace")):
        return _any_of_ours(next(iter((*args, *kwargs.values()))))
    return False


def _is_in_place(func: Callable[..., Any]) -> bool:
    return _has_name_in_place(func)


# The effect of torch.compiler.assume_constant_result, which imports all of Dynamo: 2.5 s.
_is_in_place._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001 - see above


@functools.lru_cache(maxsize=4096)
def _has_name_in_place(func: Callable[..., Any]) -> bool:
    name = _name(func)
    ends_so = name.endswith("_") and not name.endswith("__")
    return (ends_so and name not in _SETS_A_FLAG) or name in _INPLACE_OPERATORS


def _writes_elsewhere(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Return whether the call writes to one of our tensors in a way that only torch's signature, or
    the function's meaning, shows."""
    if getattr(func, "__module__", "") == _COLLECTIVES:
        return _any_of_ours(_received(func, args, kwargs))
    return any(
        _any_of_ours(args[place] if place < len(args) else kwargs.get(name))
        for place, name in _written_arguments(func)
    )


def _received(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the tensors that a collective writes to; torch passes sent and received ones by
    position."""
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
    """Return the written arguments by the operator's schema, torch's or another library's:
    (position, name)."""
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
    """Return the result of a function: read-only if it shares memory with one of our tensors."""
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
        return (
            False  # a sparse tensor, or what torch.func passes around: all have memory of their own
        )
    storages = (_plainly(torch.Tensor.untyped_storage, each) for each in _ours(values))
    return any(each.data_ptr() == memory for each in storages)
