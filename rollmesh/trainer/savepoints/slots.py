"""The tensors of what trains, as one rank has them: which rows of the whole, and where they lie.

Invariant: a slot's rows are those that train, and no copy, so what is read into them is trained on
from then on; a tensor that is no shard is whole at every rank, and the first one's to write. Of
FSDP2's shards (torch.distributed.fsdp.fully_shard) only those by rows are known, which is what
team.py makes. Driven by imprint.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rollmesh.core.errors import SavepointError
from rollmesh.trainer.models.safetensors_layout import DTYPE_NAMES, SUFFIX, TensorSpec
from rollmesh.trainer.ranks import Ranks


class Slot(NamedTuple):
    """See the module."""

    whole: TensorSpec
    rows: Tensor
    """Of this rank."""
    first_row: int
    is_ours: bool
    """Whether this rank writes them."""


def slots_of(named: Iterable[tuple[str, Tensor]], ranks: Ranks) -> list[Slot]:
    """In their order; at all ranks the same tensors."""
    return [_slot(name, tensor.detach(), ranks) for name, tensor in named]


def read_rows(folder: Path, slots: Sequence[Slot]) -> None:
    """Have every slot's rows as the files in `folder` have them, each of the whole tensor.

    SavepointError where there are other tensors than these.
    """
    with _opened(folder) as files:
        _compare(folder, slots, files)
        for whole, rows, first_row, _ in slots:
            if not whole.shape:
                rows.copy_(files[whole.name].get_tensor(whole.name))
            elif len(rows):
                told = files[whole.name].get_slice(whole.name)
                rows.copy_(told[first_row : first_row + len(rows)])


def _slot(name: str, tensor: Tensor, ranks: Ranks) -> Slot:
    whole = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return Slot(whole, tensor, 0, ranks.is_first)
    assert tensor.placements == (Shard(0),), f"{name} is not split by rows"
    rows, num_rows = tensor.to_local(), whole.shape[0]
    share = -(-num_rows // ranks.size)  # as torch.chunk cuts it: the last have less, or none
    first_row = min(share * ranks.rank, num_rows)
    assert len(rows) == min(share, num_rows - first_row), f"{name} is split in another way"
    return Slot(whole, rows, first_row, is_ours=True)


@contextmanager
def _opened(folder: Path) -> Iterator[dict[str, Any]]:
    """By the name of each tensor the file that has it."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        try:
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                file = stack.enter_context(safe_open(path, "pt"))
                files |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as error:
            raise SavepointError(f"{path}: {str(error).splitlines()[0]}") from None
        yield files


def _compare(folder: Path, slots: Sequence[Slot], files: dict[str, Any]) -> None:
    wanted = {
        each.whole.name: (DTYPE_NAMES[each.whole.dtype], [*each.whole.shape]) for each in slots
    }
    told = {name: file.get_slice(name) for name, file in files.items()}
    found = {name: (each.get_dtype(), each.get_shape()) for name, each in told.items()}
    if wanted == found:
        return
    name = min(each for each in wanted | found if wanted.get(each) != found.get(each))
    raise SavepointError(
        f"{folder}: is of another model: {name} is {_words(found.get(name))} there and "
        f"{_words(wanted.get(name))} here; set model.path, and what of it trains, as they were"
    )


def _words(what: tuple[str, list[int]] | None) -> str:
    return "absent" if what is None else f"{what[0]} {what[1]}"
