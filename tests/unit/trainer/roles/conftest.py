"""One rank in the test's own process, and a small model folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, and does not say so
from torch.distributed.device_mesh import init_device_mesh

from rollmesh.trainer.controller.meeting import Place
from rollmesh.trainer.tiny import TinyShape, write_tiny_model

SHAPE = TinyShape(width=32, num_layers=1, mlp_width=64)


@pytest.fixture(scope="package")
def place() -> Iterator[Place]:
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    yield Place(0, 1, mesh, "cpu")
    dist.destroy_process_group()


@pytest.fixture(scope="package")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roles") / "model"
    write_tiny_model(folder, ["a"], SHAPE, seed=0)
    return folder
