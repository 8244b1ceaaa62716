"""A small target that trains, for checkpoint tests: its snapshot, and a target of three roles.

model     two layers, a weight that is frozen where asked, a buffer that is kept and one not
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from rollmesh.core.config import TrainerConfig
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.checkpoints.snapshot import RankSnapshot
from rollmesh.trainer.ranks import SingleRank

SETTINGS = TrainerConfig(learning_rate=0.1)


class Small(nn.Module):
    """Weights of several shapes."""

    def __init__(self, seed: int, width: int = 3) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(seed)
        self.first = nn.Parameter(torch.randn(width, 5, generator=chance))
        self.scale = nn.Parameter(torch.randn((), generator=chance))
        self.last = nn.Parameter(torch.randn(7, generator=chance))
        self.register_buffer("count", torch.tensor([seed]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


class Trained:
    """A target that trains by noise from torch's generator."""

    def __init__(self, seed: int = 0, width: int = 3, device: str = "cpu") -> None:
        self.model = Small(seed, width).to(device)
        self.descent = ModelOptimizer(self.model, SETTINGS)
        self.rank_snapshot = RankSnapshot(self.model, self.descent, SingleRank())

    def snapshot(self, folder: Path) -> None:
        self.rank_snapshot.take(folder)

    def is_snapshot_written(self) -> bool:
        return self.rank_snapshot.is_written()

    def restore(self, folder: Path) -> None:
        self.rank_snapshot.restore(folder)

    def train(self, num_steps: int = 1) -> None:
        """Step each parameter that gets a gradient, which is random."""
        for _ in range(num_steps):
            for each in self.model.parameters():
                each.grad = torch.randn_like(each)
            self.descent.step(loss=0.0)
            count = self.model.get_buffer("count")
            count += 1

    def values(self) -> list[Tensor]:
        """Everything in a checkpoint except the generators' states."""
        parameters = list(self.model.parameters())
        moments = [each for p in parameters for each in self.descent.moments(p).values()]
        kept = [*parameters, *moments, self.model.get_buffer("count")]
        return [each.detach().clone() for each in kept]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Return whether all values are equal bit by bit."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


def write(subject: Trained, folder: Path) -> Path:
    """Write a snapshot to the disk."""
    folder.mkdir()
    subject.snapshot(folder)
    wait_until_written(subject.rank_snapshot)
    return folder


def wait_until_written(snapshot: RankSnapshot) -> None:
    """Wait until the snapshot is written or has failed."""
    while not snapshot.is_written():
        pass
