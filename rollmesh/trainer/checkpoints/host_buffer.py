"""The rows of each tensor that one rank trains, and host memory for a copy of them.

- The rows are the tensors that train, not copies: reading into them changes what is trained.
- A tensor that is not sharded is complete on every rank and written by the first. Shards of FSDP2
  (torch.distributed.fsdp.fully_shard) must be split by rows.
- The memory is allocated once and refilled for each checkpoint. It is pinned if the rows are on a
  GPU, which then copies in the background.
- Rows that are adjacent in a file are adjacent here, so one rank writes each file in one piece.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rollmesh.core.errors import CheckpointError
from rollmesh.trainer.checkpoints.manifest import Buffer
from rollmesh.trainer.models.safetensors_layout import (
    DTYPE_NAMES,
    INDEX,
    SUFFIX,
    TensorSpec,
    plan_layout,
)
from rollmesh.trainer.ranks import Ranks


class TensorRows(NamedTuple):
    """The part of one tensor that this rank holds."""

    whole: TensorSpec
    rows: Tensor
    """The local rows."""
    first_row: int
    is_writer: bool
    """Whether this rank writes them."""


def rows_of_rank(named: Iterable[tuple[str, Tensor]], ranks: Ranks) -> list[TensorRows]:
    """Return the rows of this rank, in order; every rank passes the same tensors."""
    return [_rows_of(name, tensor.detach(), ranks) for name, tensor in named]


def read_rows(folder: Path, tensors: Sequence[TensorRows]) -> None:
    """Load all rows from the files in `folder`, which hold complete tensors; CheckpointError if the
    tensors differ."""
    with _open_files(folder) as files:
        _compare(folder, tensors, files)
        for whole, rows, first_row, _ in tensors:
            if not whole.shape:
                rows.copy_(files[whole.name].get_tensor(whole.name))
            elif len(rows):
                stored = files[whole.name].get_slice(whole.name)
                rows.copy_(stored[first_row : first_row + len(rows)])


def _rows_of(name: str, tensor: Tensor, ranks: Ranks) -> TensorRows:
    whole = TensorSpec(name, tensor.dtype, tuple(tensor.shape))
    if not isinstance(tensor, DTensor):
        return TensorRows(whole, tensor, 0, ranks.is_first)
    assert tensor.placements == (Shard(0),), f"{name} is not split by rows"
    rows, num_rows = tensor.to_local(), whole.shape[0]
    share = -(
        -num_rows // ranks.size
    )  # the split of torch.chunk: the last ranks have fewer rows, or none
    first_row = min(share * ranks.rank, num_rows)
    assert len(rows) == min(share, num_rows - first_row), f"{name} is split differently"
    return TensorRows(whole, rows, first_row, is_writer=True)


@contextmanager
def _open_files(folder: Path) -> Iterator[dict[str, Any]]:
    """Map each tensor name to the open file that holds it."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        try:
            for path in sorted(folder.glob(f"*{SUFFIX}")):
                file = stack.enter_context(safe_open(path, "pt"))
                files |= dict.fromkeys(file.keys(), file)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {str(error).splitlines()[0]}") from None
        yield files


def _compare(folder: Path, tensors: Sequence[TensorRows], files: dict[str, Any]) -> None:
    wanted = {
        each.whole.name: (DTYPE_NAMES[each.whole.dtype], [*each.whole.shape]) for each in tensors
    }
    slices = {name: file.get_slice(name) for name, file in files.items()}
    found = {name: (each.get_dtype(), each.get_shape()) for name, each in slices.items()}
    if wanted == found:
        return
    name = min(each for each in wanted | found if wanted.get(each) != found.get(each))
    raise CheckpointError(
        f"{folder}: written by another model: {name} is {_describe(found.get(name))} there and "
        f"{_describe(wanted.get(name))} here; restore model.path and the settings of what trains"
    )


def _describe(what: tuple[str, list[int]] | None) -> str:
    return "absent" if what is None else f"{what[0]} {what[1]}"


ALIGN = 64
"""Alignment of a folder's first tensor; tensors are ordered by the width of their elements."""


class _FileRange(NamedTuple):
    """Bytes of a file, from `offset` on."""

    path: str
    offset: int
    start: int
    """Offset in the host memory."""
    num_bytes: int


class HostBuffer:
    """Host memory for one copy of this rank's rows."""

    def __init__(self, tensors: Mapping[str, Sequence[TensorRows]], *, is_first: bool) -> None:
        """`tensors` is by folder; only the first rank writes the files' headers."""
        own = [each.rows for members in tensors.values() for each in members if each.is_writer]
        self._memory = torch.empty(
            sum(rows.nbytes for rows in own) + ALIGN * len(tensors),
            dtype=torch.uint8,
            pin_memory=any(rows.is_cuda for rows in own),
        )
        self._heads: dict[str, bytes] = {}
        self._runs: list[_FileRange] = []
        self._places: dict[tuple[str, str], Tensor] = {}
        """By folder and name."""
        end = 0
        for folder, members in tensors.items():
            end = self._place(folder, members, -(-end // ALIGN) * ALIGN)
        if not is_first:
            self._heads.clear()

    def fill(self, tensors: Mapping[str, Sequence[TensorRows]]) -> list[torch.cuda.Event]:
        """Copy all rows of the same tensors; return events that tell when GPU copies are done.

        Later work on the same GPU streams runs after the copies.
        """
        gpus = set[torch.device]()
        for folder, members in tensors.items():
            for whole, rows, *_ in members:
                if (place := self._places.get((folder, whole.name))) is not None:
                    place.copy_(rows, non_blocking=True)
                    gpus |= {rows.device} if rows.is_cuda else set()
        return [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]

    def parts(self) -> dict[str, list[tuple[int, Buffer]]]:
        """Return the bytes that this rank writes, with their offsets, by path."""
        parts: dict[str, list[tuple[int, Buffer]]] = {
            path: [(0, head)] for path, head in self._heads.items()
        }
        data = self._memory.numpy().data
        for path, offset, start, num_bytes in self._runs:
            parts.setdefault(path, []).append((offset, data[start : start + num_bytes]))
        return parts

    def _place(self, folder: str, members: Sequence[TensorRows], end: int) -> int:
        """Place a folder's tensors from `end` on; return the new end."""
        layout = plan_layout([each.whole for each in members], folder)
        self._heads |= {f"{folder}/{name}": head for name, head in layout.heads.items()}
        if layout.table:
            self._heads[f"{folder}/{folder}{INDEX}"] = layout.table
        by_name = {each.whole.name: each for each in members}
        for name, (file_name, offset) in layout.spots.items():
            tensor = by_name[name]
            if not tensor.is_writer or not tensor.rows.nbytes:
                continue
            num_bytes = tensor.rows.nbytes
            place = self._memory[end : end + num_bytes].view(tensor.whole.dtype)
            self._places[folder, name] = place.view(tensor.rows.shape)
            before = num_bytes // len(tensor.rows) * tensor.first_row if tensor.first_row else 0
            self._run(_FileRange(f"{folder}/{file_name}", offset + before, end, num_bytes))
            end += num_bytes
        return end

    def _run(self, run: _FileRange) -> None:
        """Append the range, joined to the last one if it continues that in the file."""
        last = self._runs[-1] if self._runs else None
        if last and (last.path, last.offset + last.num_bytes) == (run.path, run.offset):
            self._runs[-1] = last._replace(num_bytes=last.num_bytes + run.num_bytes)
        else:
            self._runs.append(run)
