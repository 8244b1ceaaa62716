"""The checkpoints of a run: begun between two steps, sealed during the next, found again, pruned.

    IDLE -begin-> WRITING -all ranks' parts are on the disk-> SEALING -renamed-> IDLE
                     |                                            |
                     +--- the disk refuses: one log line ---------+--> IDLE

    RUN/savepoints/000007-step-300/   sealed: complete from the moment it has this name
                   000008-step-400.part      being written, or interrupted
                   000001-step-100.gone      being removed, or interrupted in that
    RUN/checkpoint/                   the newest model folder, as hard links: written once

- A name is never used twice, so a damaged checkpoint stays beside later ones.
- The newest `keep` complete checkpoints stay; one is removed only after a newer one is on the disk.
- A checkpoint is used only after every byte of it has been verified.
"""

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Protocol

import msgspec

from rollmesh.core.errors import CallFailed, CheckpointError
from rollmesh.core.logs import get_logger
from rollmesh.trainer.checkpoints.manifest import (
    record_pieces,
    seal,
    sync_folder,
    verify,
    write_file,
)
from rollmesh.trainer.checkpoints.recovery_plan import LoopState
from rollmesh.trainer.checkpoints.snapshot import MODEL
from rollmesh.trainer.models.folders import begin_folder, end_folder

log = get_logger()

KEEP = 2
"""Complete checkpoints that are kept: the newest may become damaged on the disk."""
POLL_S = 0.1
"""Interval between calls that ask the ranks whether they have written; a tenth of it while the loop
only waits for them."""
MODEL_FOLDER = "checkpoint"
_STATE = "loop.json"
_PARTIAL, _GONE = ".part", ".gone"


class Checkpointable(Protocol):
    """State that can be saved and restored: a policy, in this process or on ranks of its own."""

    def snapshot(self, folder: Path) -> None:
        """Copy weights, optimizer and random states, and write the copy into `folder` in the
        background."""

    def is_snapshot_written(self) -> bool:
        """Return whether the copy is on the disk; CheckpointError or CallFailed if it cannot be
        written."""

    def restore(self, folder: Path) -> None:
        """Load the state from such a folder; CheckpointError if another model wrote it."""


class SavedCheckpoint(msgspec.Struct, frozen=True):
    """A complete checkpoint."""

    folder: Path
    state: LoopState
    num_bytes: int

    @property
    def model(self) -> Path | None:
        """The model folder; None if stock transformers cannot load it."""
        folder = self.folder / MODEL
        return folder if (folder / "config.json").is_file() else None


class _PendingCheckpoint(msgspec.Struct):
    partial: Path
    state: LoopState
    target: Checkpointable
    began_s: float
    copy_s: float
    poll_at_s: float = 0.0
    """When to ask the ranks again."""
    sealing: "Future[SavedCheckpoint] | None" = None


class CheckpointStore:
    """Writes, finds and prunes the checkpoints of one run."""

    def __init__(self, run_folder: Path, keep: int = KEEP) -> None:
        self.folder = run_folder / "savepoints"
        """The folder of all checkpoints."""
        self._model_folder = run_folder / MODEL_FOLDER
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, "savepoints")
        self._pending: _PendingCheckpoint | None = None
        self._number = 0
        """Number of the last checkpoint begun."""
        self._broken: set[str] = set()
        """Names of checkpoints found damaged; they do not count when others are pruned."""

    @property
    def is_writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._pending is not None

    def begin(self, state: LoopState, target: Checkpointable) -> bool:
        """Begin to save the state of the loop and its policy; return when it is copied, long before
        it is on the disk.

        Returns False and does nothing while an earlier checkpoint is being written: call again
        after the next step. Disk errors are logged, here or in `settled`.
        """
        if self._pending:
            return False
        began_s = time.monotonic()
        try:
            partial = self.folder / f"{self._next_number():06d}-step-{state.num_steps}{_PARTIAL}"
            partial.mkdir(parents=True)
        except OSError as error:
            self._fail(f"{self.folder}: {error.strerror}")
            return True
        self._thread.submit(self._remove_partial, partial)
        target.snapshot(partial)
        copy_s = time.monotonic() - began_s
        self._pending = _PendingCheckpoint(partial, state, target, began_s, copy_s)
        return True

    def settled(self, timeout_s: float = 0.0) -> SavedCheckpoint | None:
        """Return the checkpoint that has just become durable, else None; wait up to `timeout_s`.

        If one could not be written, that is logged and the run continues.
        """
        deadline_s = time.monotonic() + timeout_s
        pending = self._pending
        if pending is None:
            return None
        try:
            if not self._is_written(pending, deadline_s):
                return None
            assert pending.sealing
            saved = pending.sealing.result(max(0.0, deadline_s - time.monotonic()))
        except NotYet:
            return None
        except (CheckpointError, CallFailed, OSError) as error:
            self._pending = None
            self._thread.submit(shutil.rmtree, pending.partial, ignore_errors=True)
            self._fail(str(error))
            return None
        self._pending = None
        log.info(
            "checkpoint.saved",
            folder=str(saved.folder),
            step=saved.state.num_steps,
            num_bytes=saved.num_bytes,
            copy_s=round(pending.copy_s, 4),
            whole_s=round(time.monotonic() - pending.began_s, 2),
        )
        return saved

    def newest(self) -> SavedCheckpoint | None:
        """Return the newest complete checkpoint, after reading every byte of it.

        Newer ones that are incomplete are logged, one line each, and left as they are.
        CheckpointError if the folder cannot be read.
        """
        try:
            folders = sorted(self._folders(), reverse=True)
        except OSError as error:
            raise CheckpointError(f"{self.folder}: {error.strerror}") from None
        for folder in folders:
            if folder.suffix == _PARTIAL:
                log.warning("checkpoint.cut_off", folder=str(folder))
            if folder.suffix in (_PARTIAL, _GONE):
                continue
            try:
                return _verified(folder)
            except CheckpointError as error:
                self._broken.add(folder.name)
                log.warning("checkpoint.broken", why=str(error))
        return None

    def restore(self, saved: SavedCheckpoint, target: Checkpointable) -> LoopState:
        """Restore `target` from the checkpoint and return the loop's state; CheckpointError if
        another model wrote it."""
        target.restore(saved.folder)
        return saved.state

    def _is_written(self, pending: _PendingCheckpoint, deadline_s: float) -> bool:
        """Return whether all parts are on the disk; from then on the checkpoint is being sealed."""
        while pending.sealing is None:
            now_s = time.monotonic()
            is_waiting = now_s < deadline_s
            if now_s >= pending.poll_at_s or is_waiting:
                pending.poll_at_s = now_s + POLL_S
                if pending.target.is_snapshot_written():
                    pending.sealing = self._thread.submit(self._seal, pending)
                    break
            if not is_waiting:
                return False
            time.sleep(POLL_S / 10)
        return True

    def _seal(self, pending: _PendingCheckpoint) -> SavedCheckpoint:
        partial, state = pending.partial, pending.state
        data = msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"
        record_pieces(partial, "loop", {_STATE: write_file(partial / _STATE, data)})
        manifest = seal(partial)
        folder = partial.with_suffix("")
        partial.rename(folder)
        sync_folder(self.folder)
        saved = SavedCheckpoint(folder, state, manifest.num_bytes)
        try:
            if saved.model:
                _link_model(saved.model, self._model_folder)
            self._prune()
        except OSError as error:  # the checkpoint is complete all the same
            log.warning("checkpoint.model_not_linked", why=f"{error.filename}: {error.strerror}")
        return saved

    def _prune(self) -> None:
        """Remove complete checkpoints older than the newest `keep`, renamed first, so that none is
        incomplete under its own name."""
        sealed = [path for path in self._folders() if not path.suffix]
        whole = sorted(path for path in sealed if path.name not in self._broken)
        for old in whole[: -self._keep]:
            old.rename(gone := old.with_suffix(_GONE))
            shutil.rmtree(gone, ignore_errors=True)

    def _remove_partial(self, partial: Path) -> None:
        """Remove what earlier processes left half written or half removed."""
        for path in self._folders():
            if path.suffix and path != partial:
                shutil.rmtree(path, ignore_errors=True)

    def _next_number(self) -> int:
        numbers = (path.name.partition("-")[0] for path in self._folders())
        found = (int(number) for number in numbers if number.isdecimal())
        self._number = 1 + max([self._number, *found])
        return self._number

    def _folders(self) -> list[Path]:
        try:
            return [path for path in self.folder.iterdir() if path.name[:1].isdecimal()]
        except FileNotFoundError:
            return []

    def _fail(self, why: str) -> None:
        log.error(
            "checkpoint.failed",
            why=why,
            fix="the journal keeps what is needed until a checkpoint is written",
        )


def _verified(folder: Path) -> SavedCheckpoint:
    num_bytes = verify(folder).num_bytes
    path = folder / _STATE
    try:
        return SavedCheckpoint(
            folder, msgspec.json.decode(path.read_bytes(), type=LoopState), num_bytes
        )
    except (OSError, msgspec.MsgspecError) as error:
        raise CheckpointError(f"{path}: not written by this version of rollmesh: {error}") from None


def _link_model(model: Path, folder: Path) -> None:
    """Publish the files of `model` under `folder` as well."""
    partial = begin_folder(folder)
    for path in model.iterdir():
        try:
            os.link(path, partial / path.name)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, partial / path.name)
    end_folder(folder)
