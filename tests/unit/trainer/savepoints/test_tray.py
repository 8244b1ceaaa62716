"""Copies of any number of ranks, put where they belong: the files that one rank would write."""

import math
import tempfile
from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from rollmesh.tensors.segment import SHARED_MEMORY
from rollmesh.trainer.models.safetensors_layout import TensorSpec
from rollmesh.trainer.savepoints.manifest import prove, seal, tell, write_pieces
from rollmesh.trainer.savepoints.slots import Slot
from rollmesh.trainer.savepoints.tray import ALIGN, Tray

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Tensor]:
    """By name, of any shape and type."""
    shapes = draw(st.lists(st.lists(st.integers(0, 7), max_size=2), min_size=1, max_size=6))
    made = {}
    for number, shape in enumerate(shapes):
        dtype = draw(st.sampled_from(DTYPES))
        made[f"t{number}"] = torch.randint(0, 2, shape).to(dtype)
    return made


def slots_at(rank: int, num_ranks: int, whole: dict[str, Tensor]) -> list[Slot]:
    """What a rank has of them, by rows; scalars are the first's."""
    slots = []
    for name, tensor in whole.items():
        what = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
        if not tensor.dim():
            slots.append(Slot(what, tensor, 0, rank == 0))
            continue
        share = math.ceil(len(tensor) / num_ranks)
        first = min(share * rank, len(tensor))
        slots.append(Slot(what, tensor[first : first + share], first, is_ours=True))
    return slots


@given(tensors(), tensors(), st.integers(1, 4))
def test_ranks_write_the_files_that_one_would(
    model: dict[str, Tensor], optimizer: dict[str, Tensor], num_ranks: int
) -> None:
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as folder:  # where a sync costs nothing
        check_that_ranks_write_one(Path(folder), model, optimizer, num_ranks)


def check_that_ranks_write_one(
    folder: Path, model: dict[str, Tensor], optimizer: dict[str, Tensor], num_ranks: int
) -> None:
    whole = {"model": model, "optimizer": optimizer}
    for name in whole:
        (folder / name).mkdir()
    for rank in reversed(range(num_ranks)):  # whoever comes first
        own = {name: slots_at(rank, num_ranks, each) for name, each in whole.items()}
        tray = Tray(own, is_first=rank == 0)
        tray.fill(own)
        parts = tray.parts()
        assert all(len(each) <= 2 for each in parts.values()) or num_ranks > 1
        tell(folder, str(rank), {path: write_pieces(folder / path, parts[path]) for path in parts})
    seal(folder)
    prove(folder)
    for name, each in whole.items():
        found = load_file(folder / name / f"{name}.safetensors")
        assert found.keys() == each.keys()
        assert all(found[key].equal(each[key]) for key in each)
        assert all(found[key].dtype == each[key].dtype for key in each)


def test_a_copy_is_as_large_as_what_is_copied_and_is_filled_anew() -> None:
    tensor = torch.zeros(1000)
    slots = {"model": slots_at(0, 1, {"t": tensor})}
    tray = Tray(slots, is_first=True)
    tray.fill(slots)
    [head, (_, before)] = tray.parts()["model/model.safetensors"]
    assert len(head[1]) < 200
    tensor += 1
    assert not any(before), "what trains goes on beside it"
    tray.fill(slots)
    [_, (_, after)] = tray.parts()["model/model.safetensors"]
    assert bytes(after) == tensor.numpy().tobytes()
    assert len(after) == tensor.nbytes <= tray._memory.nbytes <= tensor.nbytes + ALIGN  # noqa: SLF001 - nothing else tells
