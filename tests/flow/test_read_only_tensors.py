"""Read-only tensors work wherever torch takes tensors: autograd, transforms, collectives,
loaders.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from rollmesh.core.errors import TensorError
from rollmesh.tensors.torch_bridge import to_content, to_tensor


def local(tensor: torch.Tensor) -> Any:
    return to_tensor(to_content(tensor))


def test_gradients_flow_through_a_read_only_tensor() -> None:
    x = local(torch.arange(4, dtype=torch.float32))
    weight = nn.Parameter(torch.ones(4))
    torch.autograd.backward((weight * x).sum())
    assert weight.grad is not None
    assert weight.grad.tolist() == [0, 1, 2, 3]
    x.requires_grad_()
    (x * x).sum().backward()
    assert x.grad.tolist() == [0, 2, 4, 6]
    assert type(x.grad) is torch.Tensor
    layer = nn.Linear(4, 2)
    torch.autograd.backward(layer(local(torch.ones(3, 4))).sum())
    assert layer.weight.grad is not None


def test_function_transforms_take_a_read_only_tensor() -> None:
    x = local(torch.ones(3, 4))
    assert torch.vmap(torch.sum)(x).tolist() == [4, 4, 4]
    gradient = torch.func.grad(lambda w: (w * x).sum())(torch.ones(3, 4))
    assert torch.equal(gradient, torch.ones(3, 4))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile without graph breaks."""
    traced: Callable[..., Any] = torch.compile(function, backend="eager", fullgraph=True)
    return traced


def test_a_compiled_function_takes_a_read_only_tensor() -> None:
    x = local(torch.ones(3, 4))
    result = compiled(lambda a, w: (a * w).sum() + w.add_(a).sum() + a[0].sum())(
        x, torch.ones(3, 4)
    )
    assert type(result) is torch.Tensor
    assert result.item() == 40.0


@pytest.mark.parametrize(
    "write",
    [
        lambda a: a.add_(1).sum(),
        lambda a: a.__setitem__(0, 7.0),
        lambda a: torch.add(torch.ones(3, 4), 1, out=a),
        lambda a: nn.functional.relu(a, inplace=True),
    ],
)
def test_a_compiled_function_that_writes_to_a_read_only_tensor_is_refused(
    write: Callable[[Any], Any],
) -> None:
    x = local(torch.ones(3, 4))
    with pytest.raises(TensorError, match=r"would write to a read-only tensor"):
        torch.compile(write, backend="eager")(x)
    assert torch.equal(x, torch.ones(3, 4))


@pytest.fixture
def lone_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process only."""
    meeting = f"file://{tmp_path}/meeting"
    distributed.init_process_group("gloo", init_method=meeting, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("lone_rank")
def test_collectives_take_a_read_only_tensor() -> None:
    x = local(torch.ones(3, 4))
    gathered = [torch.empty(3, 4)]
    distributed.all_gather(gathered, x)
    assert torch.equal(gathered[0], x)
    distributed.broadcast(x, src=0)
    distributed.broadcast(x, group_src=0)
    distributed.scatter(torch.empty(3, 4), [x], src=0)
    distributed.gather(x, gathered, dst=0)
    distributed.all_to_all_single(torch.empty(3, 4), x)
    assert torch.equal(gathered[0], x)


@pytest.mark.usefixtures("lone_rank")
@pytest.mark.parametrize(
    "receive",
    [
        distributed.all_reduce,
        lambda x: distributed.all_reduce(x[0]),
        lambda x: distributed.reduce(x, dst=0),
        lambda x: distributed.broadcast(x, src=1),
        lambda x: distributed.broadcast(x, group_src=1),
        lambda x: distributed.recv(x, src=0),
        lambda x: distributed.irecv(x, src=0),
        lambda x: distributed.scatter(x, [torch.ones(3, 4)], src=0),
        lambda x: distributed.gather(x, [x], dst=0),
        lambda x: distributed.reduce_scatter(x, [torch.ones(3, 4)]),
    ],
)
def test_a_collective_that_receives_into_a_read_only_tensor_is_refused(
    receive: Callable[[Any], Any],
) -> None:
    x = local(torch.ones(3, 4))
    with pytest.raises(TensorError, match=r"would write to a read-only tensor, .* clone\(\)"):
        receive(x)
    assert torch.equal(x, torch.ones(3, 4))


@pytest.mark.usefixtures("lone_rank")
def test_sharded_models_take_a_read_only_tensor_and_their_own_tensors_are_refused() -> None:
    mesh = init_device_mesh("cpu", (1,))
    layer = nn.Linear(4, 1)
    fully_shard(layer, mesh=mesh)
    torch.autograd.backward(layer(local(torch.ones(3, 4))).sum())
    gradient = layer.weight.grad
    assert isinstance(gradient, DTensor)
    with pytest.raises(TensorError, match=r"DTensor .* cannot be stored"):
        to_content(gradient)
    assert local(gradient.full_tensor()).tolist() == [[3, 3, 3, 3]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_data_loader_collates_read_only_tensors(num_workers: int) -> None:
    rows: Any = [local(torch.full((4,), float(n))) for n in range(8)]
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=4, num_workers=num_workers)
    batches = list(loader)
    assert [type(batch) for batch in batches] == [torch.Tensor] * 2
    assert torch.equal(torch.cat(batches)[:, 0], torch.arange(8.0))


def test_a_read_only_tensor_is_pinned_like_any_other() -> None:
    # Without a device to pin for, torch also refuses a plain tensor.
    try:
        torch.ones(2).pin_memory()
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=str(error).splitlines()[0][:20]):
            local(torch.ones(2)).pin_memory()
    else:
        assert type(local(torch.ones(2)).pin_memory()) is torch.Tensor
