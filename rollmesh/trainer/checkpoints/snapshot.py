"""One rank's part of a checkpoint: copied at once, then written while the next steps run.

    model/model.safetensors           the complete weights; each rank writes its own rows in place
    model/config.json, ...            so that stock transformers loads the folder
    optimizer/optimizer.safetensors   `exp_avg/NAME`, `exp_avg_sq/NAME` and `step/NAME`, likewise
    random-0.safetensors, ...         generators of each rank; nothing is pickled

- Nothing is gathered. Any number of ranks reads what any other number has written. A tensor that is
  not sharded is complete on every rank and written by the first; FSDP2 must shard by rows.
- A copy is of one moment: the weights may change once `take` has returned.
- One copy is written at a time, on its own thread, from host memory that is allocated once. It is
  pinned if the rows are on a GPU, which then copies in the background.
- Rows that are adjacent in a file are adjacent in that memory, so one rank writes each file in one
  piece.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rollmesh.core.errors import CheckpointError
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.checkpoints.manifest import Buffer, record_pieces, write_pieces
from rollmesh.trainer.models.folders import DTYPE_NAMES, INDEX, SUFFIX, TensorSpec, plan_layout
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
    """Return the rows of this rank, in order; every rank passes the same tensors.

    They are the tensors that train, not copies: reading into them changes what is trained.
    """
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


MODEL, OPTIMIZER = "model", "optimizer"
"""Folders, and the stems of the files in them."""
_DONE, _WRITING, _FAILED = 0.0, 1.0, 2.0

WriteModelFiles = Callable[[Path], None]
"""Writes the files of a model folder other than weights into the given folder."""


class RankSnapshot:
    """Snapshots of the trainable parameters of `model`, its buffers, and their optimizer state."""

    def __init__(self, model: nn.Module, optimizer: ModelOptimizer, ranks: Ranks) -> None:
        """`model` is already sharded over the ranks."""
        self._model = model
        self._optimizer = optimizer
        self._ranks = ranks
        # Read now: after a forward without a backward the model shows gathered parameters.
        self._named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    @torch.no_grad()
    def take(self, folder: Path, write_model_files: WriteModelFiles | None = None) -> None:
        """Copy now, and write the copy into `folder` in the background; the first rank also calls
        `write_model_files`."""
        if self._writing:
            self._writing.exception()  # abandoned because another rank failed
        copied, rng = self._host_buffer.fill(self._slots()), rng_state()

        def write() -> None:
            for gpus in copied:
                gpus.synchronize()
            try:
                self._write(folder, rng, write_model_files if self._ranks.is_first else None)
            except OSError as error:
                raise CheckpointError(f"{error.filename or folder}: {error.strerror}") from None

        self._writing = self._thread.submit(write)

    def is_written(self) -> bool:
        """Return whether every rank's part is on the disk. A collective; CheckpointError if this
        rank's part could not be written."""
        writing, own = self._writing, _DONE
        if writing:
            own = _WRITING if not writing.done() else _FAILED if writing.exception() else _DONE
        status = self._ranks.max(own)
        if own == _FAILED and writing:
            self._writing = None
            writing.result()
        return status != _WRITING

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Load the state from `folder`, whose bytes are verified; CheckpointError if another model
        wrote it."""
        for name, slots in self._slots().items():
            read_rows(folder / name, slots)
        states = folder / self._rng_name
        if states.exists():  # else there were fewer ranks, and this one keeps its initial state
            restore_rng_state(states.read_bytes())

    @property
    def _rng_name(self) -> str:
        return f"random-{self._ranks.rank}.safetensors"

    @cached_property
    def _host_buffer(self) -> HostBuffer:
        return HostBuffer(self._slots(), is_first=self._ranks.is_first)

    def _slots(self) -> dict[str, list[TensorRows]]:
        """Rows of this rank, by folder."""
        moments = [
            (f"{kind}/{name}", each)
            for name, parameter in self._named
            for kind, each in self._optimizer.moments(parameter).items()
        ]
        weights = [*self._named, *self._buffers()]
        return {
            MODEL: rows_of_rank(weights, self._ranks),
            OPTIMIZER: rows_of_rank(moments, self._ranks),
        }

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers that are part of the model's folder."""
        # state_dict() also makes FSDP2 drop what a forward left gathered, so that the next one
        # gathers again.
        kept = self._model.state_dict().keys()
        return ((name, each) for name, each in self._model.named_buffers() if name in kept)

    def _write(self, folder: Path, rng: bytes, write_model_files: WriteModelFiles | None) -> None:
        for name in (MODEL, OPTIMIZER):
            (folder / name).mkdir(exist_ok=True)
        parts = self._host_buffer.parts()
        parts[self._rng_name] = [(0, rng)]
        if write_model_files:
            write_model_files(folder / MODEL)
            for path in (folder / MODEL).iterdir():
                if path.suffix != SUFFIX:  # weights are written by rows, by all ranks
                    parts[f"{MODEL}/{path.name}"] = [(0, path.read_bytes())]
        written = {path: write_pieces(folder / path, data) for path, data in parts.items()}
        record_pieces(folder, str(self._ranks.rank), written)


_TORCH, _CUDA, _NUMPY, _PYTHON = "torch", "cuda", "numpy", "python"
_SCALARS = "small"
"""Values that are no arrays: JSON, as bytes."""


class _RngScalars(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    numpy_position: int
    numpy_has_gauss: int
    numpy_gauss: float
    python_form: int
    python_gauss: float | None


def rng_state() -> bytes:
    """Return the states of torch's generators (CPU and used GPUs), numpy's and Python's, as
    safetensors."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    form, mt_state, python_gauss = random.getstate()
    small = _RngScalars(int(position), int(has_gauss), float(gauss), form, python_gauss)
    arrays: dict[str, npt.NDArray[Any]] = {
        _TORCH: torch.get_rng_state().numpy(),
        _NUMPY: np.asarray(keys, np.uint32),
        _PYTHON: np.array(mt_state, np.uint32),
        _SCALARS: np.frombuffer(msgspec.json.encode(small), np.uint8),
    }
    for number in range(_num_gpus()):
        arrays[f"{_CUDA}{number}"] = torch.cuda.get_rng_state(number).numpy()
    return safetensors.numpy.save(arrays)


def restore_rng_state(data: bytes) -> None:
    """Continue from such states; CheckpointError if `data` is no such file. A GPU without a stored
    state keeps its own."""
    try:
        arrays = safetensors.numpy.load(data)
        small = msgspec.json.decode(arrays[_SCALARS].tobytes(), type=_RngScalars)
        torch.set_rng_state(torch.from_numpy(arrays[_TORCH].copy()))
        gauss = (small.numpy_position, small.numpy_has_gauss, small.numpy_gauss)
        np.random.set_state(("MT19937", arrays[_NUMPY], *gauss))
        mt_state = tuple(arrays[_PYTHON].tolist())
        random.setstate((small.python_form, mt_state, small.python_gauss))
        for number in range(_num_gpus()):
            if (state := arrays.get(f"{_CUDA}{number}")) is not None:
                torch.cuda.set_rng_state(torch.from_numpy(state.copy()), number)
    except (KeyError, ValueError, TypeError, SafetensorError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"not a file of random generator states: {error}") from None


def _num_gpus() -> int:
    """Number of GPUs if this process uses CUDA: querying them otherwise would allocate memory on
    each."""
    is_used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.device_count() if is_used else 0
