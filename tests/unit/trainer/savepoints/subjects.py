"""A small thing that trains, for tests of savepoints: fields of an imprint, and a subject of three.

model     two layers, a weight that is frozen where asked, a buffer that is kept and one not
"""

from pathlib import Path

import torch
from torch import Tensor, nn

from rollmesh.core.config import TrainerConfig
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.ranks import SingleRank
from rollmesh.trainer.savepoints.imprint import Imprint

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
    """A subject that trains by noise, which is drawn from torch's generator."""

    def __init__(self, seed: int = 0, width: int = 3, device: str = "cpu") -> None:
        self.model = Small(seed, width).to(device)
        self.descent = ModelOptimizer(self.model, SETTINGS)
        self.imprint = Imprint(self.model, self.descent, SingleRank())

    def snapshot(self, folder: Path) -> None:
        self.imprint.take(folder)

    def is_snapshot_written(self) -> bool:
        return self.imprint.is_written()

    def restore(self, folder: Path) -> None:
        self.imprint.restore(folder)

    def train(self, num_steps: int = 1) -> None:
        """Each with a gradient by chance."""
        for _ in range(num_steps):
            for each in self.model.parameters():
                each.grad = torch.randn_like(each)
            self.descent.step(loss=0.0)
            count = self.model.get_buffer("count")
            count += 1

    def values(self) -> list[Tensor]:
        """All that a savepoint keeps, but for chance."""
        parameters = list(self.model.parameters())
        moments = [each for p in parameters for each in self.descent.moments(p).values()]
        kept = [*parameters, *moments, self.model.get_buffer("count")]
        return [each.detach().clone() for each in kept]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    """Bit by bit."""
    return len(some) == len(others) and all(map(torch.equal, some, others))


def write(subject: Trained, folder: Path) -> Path:
    """Its snapshot, on the disk."""
    folder.mkdir()
    subject.snapshot(folder)
    wait_until_written(subject.imprint)
    return folder


def wait_until_written(imprint: Imprint) -> None:
    """Or until it is told why not."""
    while not imprint.is_written():
        pass
