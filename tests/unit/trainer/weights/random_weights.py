"""Small weights of many kinds, and the tensors in a part of a payload."""

import numpy as np
import torch
from torch import Tensor

from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.tensors.segment import AttachedSegment


def random_weights(seed: int) -> dict[str, Tensor]:
    """Return one tensor of each kind."""
    chance = torch.Generator().manual_seed(seed)
    return {
        "matrix": torch.randn(33, 7, generator=chance),
        "half": torch.randn(5, 3, generator=chance).to(torch.bfloat16),
        "vector": torch.randn(11, generator=chance),
        "counts": torch.randint(0, 9, (4,), generator=chance),
        "scalar": torch.randn((), generator=chance),
        "nothing": torch.empty(0, 3),
    }


def read(part: SharedSegment) -> dict[str, Tensor]:
    """Read the part as another process would."""
    memory = AttachedSegment(part.path)
    tensors = {}
    for piece in part.pieces:
        tensor = torch.empty(piece.shape, dtype=getattr(torch, piece.dtype))
        data = np.array(memory.view(piece.offset, piece.num_bytes))
        if len(data):
            tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(data))
        tensors[piece.name] = tensor
    return tensors
