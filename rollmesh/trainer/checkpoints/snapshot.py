"""One rank's part of a checkpoint: copied at once, then written while the next steps run.

    model/model.safetensors           the complete weights; each rank writes its own rows in place
    model/config.json, ...            so that stock transformers loads the folder
    optimizer/optimizer.safetensors   `exp_avg/NAME`, `exp_avg_sq/NAME` and `step/NAME`, likewise
    random-0.safetensors, ...         generators of each rank; nothing is pickled

- Nothing is gathered. Any number of ranks reads what any other number has written.
- A copy is of one moment: the weights may change once `take` has returned.
- One copy is written at a time, on its own thread.
"""

import random
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from rollmesh.core.errors import CheckpointError
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.checkpoints.host_buffer import HostBuffer, TensorRows, read_rows, rows_of_rank
from rollmesh.trainer.checkpoints.manifest import record_pieces, write_pieces
from rollmesh.trainer.models.safetensors_layout import SUFFIX
from rollmesh.trainer.ranks import Ranks

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
