"""Any tensor is copied bit by bit, and a consumer's tensor is read-only."""

import copy
import gc
import math
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from rollmesh.core.errors import TensorError
from rollmesh.tensors.handles import Content
from rollmesh.tensors.torch_bridge import ReadOnlyTensor, to_content, to_tensor

DTYPES = [
    torch.bool,
    torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
    torch.complex32, torch.complex64, torch.complex128,
]  # fmt: skip


def of_random_bits(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits: NaNs with payloads, denormals, negative zeros."""
    generator = torch.Generator().manual_seed(7)
    num_bytes = math.prod(shape) * dtype.itemsize
    top = 2 if dtype is torch.bool else 256
    flat = torch.randint(0, top, (num_bytes,), dtype=torch.uint8, generator=generator)
    return flat.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return bytes(plain.numpy().tobytes())


def stored(tensor: torch.Tensor) -> Content:
    """Return it as a store does: the same bytes in memory of its own."""
    content = to_content(tensor)
    data = content.data.copy()
    data.flags.writeable = False
    return Content(content.dtype, content.shape, data)


def local(tensor: torch.Tensor) -> Any:
    return to_tensor(stored(tensor))


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (0,), (4, 0, 2), (1, 1, 1, 1, 7)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_shape_is_copied_bit_by_bit(
    dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    tensor = of_random_bits(dtype, *shape)
    back = local(tensor)
    assert isinstance(back, ReadOnlyTensor)
    assert (back.dtype, tuple(back.shape)) == (dtype, shape)
    assert bits(back) == bits(tensor)


@pytest.mark.parametrize(
    "cut",
    [
        lambda x: x[1],
        lambda x: x[:, 1::2],
        lambda x: x.T,
        lambda x: x[::3, 2],
        lambda x: x[:1].expand(5, 6),
        lambda x: x.flip(0),
        lambda x: x[2:2],
        lambda x: x[3, 4],
        lambda x: x[0, ::6],
        lambda x: x[3:, 2::6],
        lambda x: x[:, 5:],
        lambda x: x.requires_grad_(),
        lambda x: nn.Parameter(x),
        lambda x: torch.complex(x, x).conj(),
        lambda x: torch.complex(x, -x).conj().imag,
        lambda x: torch.complex(x[0, 1:2], x[0, 1:2]).conj().imag,
    ],
)
def test_a_view_is_stored_without_the_rest_of_its_memory(
    cut: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    tensor = cut(torch.arange(24, dtype=torch.float32).view(4, 6))
    content = to_content(tensor)
    assert content.data.nbytes == tensor.numel() * tensor.itemsize
    back = to_tensor(content)
    assert torch.equal(back, tensor.detach())
    assert not back.requires_grad


@st.composite
def views(draw: st.DrawFn) -> torch.Tensor:
    """A tensor with random strides: cut, transposed and spread."""
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    dtype = draw(st.sampled_from([torch.int8, torch.bfloat16, torch.float64, torch.complex64]))
    tensor = of_random_bits(torch.int8, *shape).to(dtype)
    for _ in range(draw(st.integers(0, 3))):
        steps = [draw(st.integers(1, 5)) for _ in tensor.shape]
        starts = [draw(st.integers(0, 3)) for _ in tensor.shape]
        tensor = tensor[tuple(slice(a, None, b) for a, b in zip(starts, steps, strict=True))]
        tensor = tensor.permute(draw(st.permutations(range(tensor.dim()))))
        if tensor.dim() < 6 and draw(st.booleans()):
            tensor = tensor.unsqueeze(draw(st.integers(0, tensor.dim())))
            tensor = tensor.expand([each if each != 1 else 2 for each in tensor.shape])
    return tensor.conj().imag if dtype.is_complex and draw(st.booleans()) else tensor


@given(views())
def test_a_tensor_of_any_strides_is_stored_in_its_logical_order(tensor: torch.Tensor) -> None:
    content = to_content(tensor)
    assert content.data.nbytes == tensor.numel() * tensor.itemsize
    assert torch.equal(to_tensor(content), tensor)


def test_contiguous_memory_is_not_copied() -> None:
    tensor = torch.arange(8)
    assert to_content(tensor).data.ctypes.data == tensor.data_ptr()
    assert not to_content(tensor).data.flags.writeable
    content = stored(tensor)
    assert to_tensor(content).data_ptr() == content.data.ctypes.data
    assert to_content(to_tensor(content)).data.ctypes.data == content.data.ctypes.data


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_tensor_of_a_device_is_brought_to_the_host() -> None:
    tensor = torch.arange(8, device="cuda")
    assert torch.equal(local(tensor), tensor.cpu())
    assert type(local(tensor).to("cuda")) is torch.Tensor


@pytest.mark.filterwarnings("ignore:torch.quantize", "ignore:The PyTorch API of nested")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.eye(3).to_sparse(),
        lambda: torch.empty(3, device="meta"),
        lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
    ids=["sparse", "meta", "quantized", "nested"],
)
def test_a_tensor_without_bytes_of_its_own_is_refused_in_one_line(
    make: Callable[[], torch.Tensor],
) -> None:
    with pytest.raises(TensorError, match="cannot be stored") as caught:
        to_content(make())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes"),
    [
        ("float32", (2,), 7),
        ("float32", (2,), 12),
        ("float32", (0,), 4),
        ("bool", (2**40,), 1),
        ("no_such_dtype", (1,), 1),
        ("Tensor", (1,), 1),
    ],
)
def test_bytes_of_a_wrong_size_are_no_tensor(
    dtype: str, shape: tuple[int, ...], num_bytes: int
) -> None:
    with pytest.raises(TensorError):
        to_tensor(Content(dtype, shape, np.zeros(num_bytes, np.uint8)))


def test_a_tensor_and_its_views_keep_the_array_itself_alive() -> None:
    whole = np.zeros(64, np.uint8)
    part = whole[16:48]
    part.flags.writeable = False
    gone = weakref.ref(part)
    row = to_tensor(Content("int32", (2, 4), part))[1]
    del part
    gc.collect()
    assert gone() is not None
    del row
    assert gone() is None


FOREIGN: Any = torch.ops.rollmesh_tests
"""Operators like those of other libraries: their names do not show what they write to."""


@torch.library.custom_op("rollmesh_tests::grow", mutates_args={"total"})
def grow(by: torch.Tensor, total: torch.Tensor) -> None:
    total.add_(by.sum())


IN_PLACE: dict[str, Callable[[Any], object]] = {
    "add_": lambda x: x.add_(1),
    "zero_": lambda x: x.zero_(),
    "row add_": lambda x: x[0].add_(1),
    "row by row": lambda x: [row.mul_(2) for row in x],
    "view": lambda x: x.view(-1).copy_(torch.ones(12)),
    "transposed": lambda x: x.T.fill_(1),
    "detached": lambda x: x.detach().sub_(1),
    "data": lambda x: x.data.add_(1),
    "split": lambda x: x.split(1)[0].add_(1),
    "chunk": lambda x: x.chunk(2, dim=1)[1].add_(1),
    "unbind": lambda x: torch.unbind(x)[0].add_(1),
    "broadcast": lambda x: torch.broadcast_to(x, (2, 3, 4)).add_(1),
    "meshgrid": lambda x: torch.meshgrid(x[0], x[1], indexing="ij")[0].add_(1),
    "as_strided": lambda x: torch.as_strided(x, (2,), (1,)).add_(1),
    "contiguous": lambda x: x.contiguous().add_(1),
    "to": lambda x: x.to(torch.float32).add_(1),
    "cpu": lambda x: x.cpu().add_(1),
    "as_tensor": lambda x: torch.as_tensor(x).add_(1),
    "asarray": lambda x: torch.asarray(x).add_(1),
    "flatten": lambda x: x.flatten().add_(1),
    "unflatten": lambda x: x.unflatten(1, (2, 2)).add_(1),
    "type": lambda x: x.type(torch.float32).add_(1),
    "float": lambda x: x.float().add_(1),
    "view of dtype": lambda x: x.view(torch.int32).add_(1),
    "reshape": lambda x: functional.relu(x.reshape(4, 3), inplace=True),
    "no_grad": lambda x: torch.no_grad()(lambda: x[0].add_(1))(),
    "inference": lambda x: torch.inference_mode()(lambda: x[0].add_(1))(),
    "+=": lambda x: x.__iadd__(1),
    "**=": lambda x: x.__ipow__(2),
    "item": lambda x: x.__setitem__(0, 1.0),
    "mask": lambda x: x.__setitem__(torch.ones(3, 4, dtype=torch.bool), 1.0),
    "out": lambda x: torch.add(torch.ones(3, 4), 1, out=x),
    "out of two": lambda x: torch.max(
        torch.ones(3, 4), 1, out=(x[:, 0], torch.empty(3, dtype=torch.long))
    ),
    "relu_": lambda x: torch.relu_(x),
    "by name": lambda x: torch.relu_(input=x),
    "dropout": lambda x: functional.dropout(x, 0.5, inplace=True),
    "module": lambda x: nn.ReLU(inplace=True)(x),
    "init": lambda x: nn.init.normal_(x),
    "init by name": lambda x: nn.init.zeros_(tensor=x),
    "foreach": lambda x: torch._foreach_add_([torch.ones(3, 4), x], 1),
    "aten": lambda x: torch.ops.aten.add_.Tensor(x, 1),
    "aten packet": lambda x: torch.ops.aten.add_(x, 1),
    "operator of others": lambda x: FOREIGN.grow(torch.ones(2), total=x),
    "overload of others": lambda x: FOREIGN.grow.default(torch.ones(2), x),
    "aten out": lambda x: torch.ops.aten.add.out(torch.ones(3, 4), 1, out=x),
    "index_put_": lambda x: x.index_put_((torch.tensor([0]),), torch.tensor(1.0)),
    "scatter_": lambda x: x.scatter_(0, torch.zeros(1, 4, dtype=torch.long), 1.0),
    "resize_": lambda x: x.resize_(1),
    "real": lambda x: setattr(x, "real", torch.ones(3, 4)),
    "optimizer": lambda x: _step_of(torch.optim.SGD([nn.Parameter(x)], lr=1.0)),
    "fused": lambda x: _step_of(torch.optim.AdamW([nn.Parameter(x)], lr=1.0, fused=True)),
    "numpy": lambda x: x.numpy().__setitem__(0, 1),
    "array": lambda x: np.asarray(x).__setitem__(0, 1),
    "numpy row": lambda x: x[1].numpy(force=True).fill(1),
}


def _step_of(optimizer: torch.optim.Optimizer) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones(3, 4)
    optimizer.step()


@pytest.mark.parametrize("write", IN_PLACE.values(), ids=IN_PLACE)
def test_shared_tensors_are_read_only(write: Callable[[Any], object]) -> None:
    content = stored(torch.arange(12, dtype=torch.float32).view(3, 4))
    before = content.data.tobytes()
    with pytest.raises((TensorError, ValueError), match="read-only"):
        write(to_tensor(content))
    assert content.data.tobytes() == before


def test_the_refusal_names_the_operation_and_the_remedy() -> None:
    with pytest.raises(TensorError, match=r"^add_ would write to a read-only tensor, .* clone\(\)"):
        local(torch.ones(2)).add_(1)


NEW: dict[str, Callable[[Any], Any]] = {
    "clone": lambda x: x.clone(),
    "add": lambda x: x + 1,
    "aten": lambda x: torch.ops.aten.add(x, 1),
    "aten into another": lambda x: torch.ops.aten.add(x, 1, out=torch.empty(3, 4)),
    "radd": lambda x: torch.ones(3, 4) + x,
    "index": lambda x: x[torch.tensor([0, 2])],
    "to": lambda x: x.to(torch.bfloat16),
    "stack": lambda x: torch.stack([x, x]),
    "cat": lambda x: torch.cat([x, torch.ones(3, 4)]),
    "max": lambda x: x.max(dim=1).values,
    "where": lambda x: torch.where(x > 3, x, 0),
    "softmax": lambda x: functional.softmax(x, dim=-1),
    "new": lambda x: x.new_zeros(3),
    "like": lambda x: torch.empty_like(x),
    "deepcopy": lambda x: copy.deepcopy(x),
    "copy": lambda x: copy.copy(x),
    "row copied": lambda x: copy.deepcopy(x[0]),
    "to others": torch.utils.dlpack.from_dlpack,
    "copy_ from": lambda x: torch.empty(3, 4).copy_(x),
    "out": lambda x: torch.add(x, 1, out=torch.empty(3, 4)),
    "tensor": lambda x: x.new_tensor(x.tolist()),
}


@pytest.mark.parametrize("make", NEW.values(), ids=NEW)
def test_new_memory_is_a_plain_tensor(make: Callable[[Any], Any]) -> None:
    given = torch.arange(12, dtype=torch.float32).view(3, 4)
    x = local(given)
    made = make(x)
    assert type(made) is torch.Tensor
    before = made.clone()
    assert not torch.equal(made.add_(1), before)
    assert torch.equal(x, given)


def test_a_deep_copy_still_requires_its_gradient() -> None:
    assert copy.deepcopy(local(torch.ones(2)).requires_grad_()).requires_grad
    assert not copy.deepcopy(local(torch.ones(2))).requires_grad


@pytest.mark.parametrize("convert", [lambda x: x.to_sparse(), lambda x: x.to("meta")])
def test_a_result_without_memory_is_a_plain_tensor(convert: Callable[[Any], object]) -> None:
    assert type(convert(local(torch.eye(3)))) is torch.Tensor


class Foreign(torch.Tensor):
    """An operator of another library."""

    @classmethod
    def __torch_function__(cls, *_: Any) -> Any:
        return "handled"


def test_another_tensor_class_may_handle_the_operation() -> None:
    assert local(torch.ones(2)) + torch.ones(2).as_subclass(Foreign) == "handled"


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_a_copy_of_a_view_takes_only_its_own_bytes() -> None:
    row = local(torch.zeros(1000, 4))[0]
    assert row.__reduce_ex__(4)[1][0].nbytes() == 16


def test_results_keep_their_types() -> None:
    x = local(torch.arange(12, dtype=torch.float32).view(3, 4))
    largest = x.max(dim=1)
    assert largest.indices.tolist() == [3, 3, 3]
    assert type(x.shape) is torch.Size
    assert isinstance(x.split(2), tuple)
    assert x.tolist()[2][3] == x[2, 3].item() == 11.0
    assert repr(x[0]) == "ReadOnlyTensor([0., 1., 2., 3.])"


def test_creating_a_shared_tensor_logs_no_warning() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        local(torch.ones(2)).numpy()
    assert caught == []
