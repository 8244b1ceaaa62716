"""One rank's part of a savepoint: what trains, copied at once, written beside the next steps.

    model/model.safetensors           the whole weights, each rank's rows where they belong
    model/config.json, ...            with which stock transformers loads the folder
    optimizer/optimizer.safetensors   `exp_avg/NAME`, `exp_avg_sq/NAME` and `step/NAME`, alike
    random-0.safetensors, ...         each rank's generators

Invariants: nothing is gathered, and any number of ranks reads what any other has written; a copy is
of one moment, and the weights may change once `take` has returned; one copy is written at a time.
Driven by the policy and by the roles, on the step thread; the copy is written on a thread of its
own.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from rollmesh.core.errors import SavepointError
from rollmesh.trainer.algorithms.optimizer import ModelOptimizer
from rollmesh.trainer.models.safetensors_layout import SUFFIX
from rollmesh.trainer.ranks import Ranks
from rollmesh.trainer.savepoints.chance import chance_now, restore_chance
from rollmesh.trainer.savepoints.manifest import tell, write_pieces
from rollmesh.trainer.savepoints.slots import Slot, read_rows, slots_of
from rollmesh.trainer.savepoints.tray import Tray

MODEL, OPTIMIZER = "model", "optimizer"
"""Folders, and the stems of the files in them."""
_DONE, _WRITING, _FAILED = 0.0, 1.0, 2.0

Papers = Callable[[Path], None]
"""Writes what a model folder has besides weights into the folder that it is given."""


class Imprint:
    """Of the parameters of `model` that train, its buffers, and their optimiser."""

    def __init__(self, model: nn.Module, descent: ModelOptimizer, ranks: Ranks) -> None:
        """`model` is shared with the other ranks already."""
        self._model = model
        self._descent = descent
        self._ranks = ranks
        # Now: after a forward without a backward the model shows them gathered.
        self._named = [pair for pair in model.named_parameters() if pair[1].requires_grad]
        self._thread = ThreadPoolExecutor(1, "savepoint")
        self._writing: Future[None] | None = None

    @torch.no_grad()
    def take(self, folder: Path, papers: Papers | None = None) -> None:
        """Copy now, and write the copy into `folder` from now on, the first rank with `papers`."""
        if self._writing:
            self._writing.exception()  # of a savepoint that was given up for another rank's sake
        copied, chance = self._tray.fill(self._slots()), chance_now()

        def write() -> None:
            for gpus in copied:
                gpus.synchronize()
            try:
                self._write(folder, chance, papers if self._ranks.is_first else None)
            except OSError as error:
                raise SavepointError(f"{error.filename or folder}: {error.strerror}") from None

        self._writing = self._thread.submit(write)

    def is_written(self) -> bool:
        """Whether each rank's part is on the disk. A collective; SavepointError where this rank's
        could not be written."""
        writing, own = self._writing, _DONE
        if writing:
            own = _WRITING if not writing.done() else _FAILED if writing.exception() else _DONE
        worst = self._ranks.max(own)
        if own == _FAILED and writing:
            self._writing = None
            writing.result()
        return worst != _WRITING

    @torch.no_grad()
    def restore(self, folder: Path) -> None:
        """Have what stands in `folder`, whose bytes are proven; SavepointError where that is of
        another model."""
        for name, slots in self._slots().items():
            read_rows(folder / name, slots)
        states = folder / self._chance_name
        if states.exists():  # else there were fewer ranks, and this one draws as it began
            restore_chance(states.read_bytes())

    @property
    def _chance_name(self) -> str:
        return f"random-{self._ranks.rank}.safetensors"

    @cached_property
    def _tray(self) -> Tray:
        return Tray(self._slots(), is_first=self._ranks.is_first)

    def _slots(self) -> dict[str, list[Slot]]:
        """By folder."""
        moments = [
            (f"{kind}/{name}", each)
            for name, parameter in self._named
            for kind, each in self._descent.moments(parameter).items()
        ]
        weights = [*self._named, *self._buffers()]
        return {MODEL: slots_of(weights, self._ranks), OPTIMIZER: slots_of(moments, self._ranks)}

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        """Those that are part of the model's folder."""
        # It also has FSDP2 drop what a forward left gathered, so that the next one gathers anew.
        kept = self._model.state_dict().keys()
        return ((name, each) for name, each in self._model.named_buffers() if name in kept)

    def _write(self, folder: Path, chance: bytes, papers: Papers | None) -> None:
        for name in (MODEL, OPTIMIZER):
            (folder / name).mkdir(exist_ok=True)
        parts = self._tray.parts()
        parts[self._chance_name] = [(0, chance)]
        if papers:
            papers(folder / MODEL)
            for path in (folder / MODEL).iterdir():
                if path.suffix != SUFFIX:  # which are ours, or another rank's
                    parts[f"{MODEL}/{path.name}"] = [(0, path.read_bytes())]
        written = {path: write_pieces(folder / path, data) for path, data in parts.items()}
        tell(folder, str(self._ranks.rank), written)
