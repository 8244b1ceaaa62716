"""One tiny model folder for the whole session, and one rank in the test's own process."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore  # torch.distributed has it, but no type stub
from torch.distributed.device_mesh import init_device_mesh

from rollmesh.envs.guess import GuessEnv
from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.models.tiny import TinyShape, texts_of, write_tiny_model
from tests.unit.serve.coordinator.fake_scheduler import FakeScheduler
from tests.unit.trainer.trainer_incarnations import TrainerIncarnations


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with random weights and the game's tokenizer."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny_model(folder, texts_of(GuessEnv()), TinyShape(), seed=0)
    return folder


@pytest.fixture(scope="session")
def context() -> Iterator[RankContext]:
    """The context of a policy's only rank, in this process."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("data", "tensor"))
    yield RankContext(0, 1, mesh, "cpu")
    dist.destroy_process_group()


@pytest.fixture
def scheduler() -> Iterator[FakeScheduler]:
    """A fake scheduler whose messages the test chooses."""
    scheduler = FakeScheduler()
    yield scheduler
    scheduler.hub.close()


@pytest.fixture
def begin(tiny_folder: Path, tmp_path: Path) -> Iterator[TrainerIncarnations]:
    """Create a new incarnation of one run's trainer, after the previous one has ended."""
    incarnations = TrainerIncarnations(tiny_folder, tmp_path)
    yield incarnations
    incarnations.close()
