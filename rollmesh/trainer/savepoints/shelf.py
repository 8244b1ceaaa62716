"""The savepoints of a run: begun between two steps, sealed beside the next, found again, pruned.

    IDLE -begin-> WRITING -all ranks' parts are on the disk-> SEALING -renamed-> IDLE
                     |                                            |
                     +--- the disk refuses: one line, and on -----+--> IDLE

    RUN/savepoints/000007-step-300/   sealed: whole from the moment that it has this name
                   000008-step-400.part      being written, or cut off
                   000001-step-100.gone      being removed, or cut off in that
    RUN/checkpoint/                   the model folder of the newest, by hard links: written once

Invariants: a name is never used twice, so what is broken stays beside what is written later; of
those that are whole the newest `keep` stay, and one is removed only when a newer one is on the
disk; what is found is proven, byte by byte. Driven by the train loop, between steps.
"""

import os
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Protocol

import msgspec

from rollmesh.core.errors import CallFailed, SavepointError
from rollmesh.core.logs import get_logger
from rollmesh.trainer.models.folders import begin_folder, end_folder
from rollmesh.trainer.savepoints.imprint import MODEL
from rollmesh.trainer.savepoints.manifest import prove, seal, sync_folder, tell, write_file
from rollmesh.trainer.savepoints.state import LoopState

log = get_logger()

KEEP = 2
"""So many whole savepoints stay: the newest may go bad on the disk."""
LOOK_S = 0.1
"""Between two looks at whether the ranks have written, each a call that they answer; a tenth of it
where the loop waits for nothing else."""
CHECKPOINT = "checkpoint"
_STATE = "loop.json"
_PART, _GONE = ".part", ".gone"


class Subject(Protocol):
    """What is saved and restored: a policy, in this process or on ranks of its own."""

    def snapshot(self, folder: Path) -> None:
        """Copy weights, optimiser and random states as they are, and write them into `folder`
        beside what comes next."""

    def is_snapshot_written(self) -> bool:
        """Whether they are on the disk; SavepointError or CallFailed where they cannot be."""

    def restore(self, folder: Path) -> None:
        """Have what such a folder holds; SavepointError where it is of another model."""


class Saved(msgspec.Struct, frozen=True):
    """A savepoint that is whole."""

    folder: Path
    state: LoopState
    num_bytes: int

    @property
    def model(self) -> Path | None:
        """Its model folder; None where stock transformers does not load what it holds."""
        folder = self.folder / MODEL
        return folder if (folder / "config.json").is_file() else None


class _UnderWay(msgspec.Struct):
    part: Path
    state: LoopState
    subject: Subject
    began_s: float
    copy_s: float
    look_s: float = 0.0
    """When to look again."""
    sealing: "Future[Saved] | None" = None


class Savepoints:
    """See the module."""

    def __init__(self, run_folder: Path, keep: int = KEEP) -> None:
        self.folder = run_folder / "savepoints"
        """Where they stand."""
        self._checkpoint = run_folder / CHECKPOINT
        self._keep = keep
        self._thread = ThreadPoolExecutor(1, "savepoints")
        self._under_way: _UnderWay | None = None
        self._number = 0
        """Of the last one begun."""
        self._broken: set[str] = set()
        """By name, those that were found so: they are no reason to remove another."""

    @property
    def is_writing(self) -> bool:
        """Whether one is under way."""
        return self._under_way is not None

    def begin(self, state: LoopState, subject: Subject) -> bool:
        """Save what the loop and its policy have now; returns when it is copied, long before it is
        on the disk.

        False, and nothing happens, while an earlier one is under way: ask again after the next
        step. What the disk refuses is logged, here or in `settled`.
        """
        if self._under_way:
            return False
        began_s = time.monotonic()
        try:
            part = self.folder / f"{self._next_number():06d}-step-{state.num_steps}{_PART}"
            part.mkdir(parents=True)
        except OSError as error:
            self._fail(f"{self.folder}: {error.strerror}")
            return True
        self._thread.submit(self._sweep, part)
        subject.snapshot(part)
        copy_s = time.monotonic() - began_s
        self._under_way = _UnderWay(part, state, subject, began_s, copy_s)
        return True

    def settled(self, timeout_s: float = 0.0) -> Saved | None:
        """The savepoint that has just become durable, else None; waits up to `timeout_s`.

        One that could not be written is logged, and `is_writing` no more; the run goes on.
        """
        deadline_s = time.monotonic() + timeout_s
        under_way = self._under_way
        if under_way is None:
            return None
        try:
            if not self._is_written(under_way, deadline_s):
                return None
            assert under_way.sealing
            saved = under_way.sealing.result(max(0.0, deadline_s - time.monotonic()))
        except NotYet:
            return None
        except (SavepointError, CallFailed, OSError) as error:
            self._under_way = None
            self._thread.submit(shutil.rmtree, under_way.part, ignore_errors=True)
            self._fail(str(error))
            return None
        self._under_way = None
        log.info(
            "savepoint.saved",
            folder=str(saved.folder),
            step=saved.state.num_steps,
            num_bytes=saved.num_bytes,
            copy_s=round(under_way.copy_s, 4),
            whole_s=round(time.monotonic() - under_way.began_s, 2),
        )
        return saved

    def newest(self) -> Saved | None:
        """The newest one that is whole, every byte of which was read for that.

        Those that come before it and are not are named, a line each, and left as they are.
        SavepointError where nobody can look.
        """
        try:
            folders = sorted(self._all(), reverse=True)
        except OSError as error:
            raise SavepointError(f"{self.folder}: {error.strerror}") from None
        for folder in folders:
            if folder.suffix == _PART:
                log.warning("savepoint.cut_off", folder=str(folder))
            if folder.suffix in (_PART, _GONE):
                continue
            try:
                return _proven(folder)
            except SavepointError as error:
                self._broken.add(folder.name)
                log.warning("savepoint.broken", why=str(error))
        return None

    def restore(self, saved: Saved, subject: Subject) -> LoopState:
        """Have `subject` be what it was; what the loop knew then. SavepointError where it is
        another's."""
        subject.restore(saved.folder)
        return saved.state

    def _is_written(self, under_way: _UnderWay, deadline_s: float) -> bool:
        """Whether all parts are on the disk; from then on it is being sealed."""
        while under_way.sealing is None:
            now_s = time.monotonic()
            is_waited_for = now_s < deadline_s
            if now_s >= under_way.look_s or is_waited_for:
                under_way.look_s = now_s + LOOK_S
                if under_way.subject.is_snapshot_written():
                    under_way.sealing = self._thread.submit(self._seal, under_way)
                    break
            if not is_waited_for:
                return False
            time.sleep(LOOK_S / 10)
        return True

    def _seal(self, under_way: _UnderWay) -> Saved:
        part, state = under_way.part, under_way.state
        data = msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"
        tell(part, "loop", {_STATE: write_file(part / _STATE, data)})
        manifest = seal(part)
        folder = part.with_suffix("")
        part.rename(folder)
        sync_folder(self.folder)
        saved = Saved(folder, state, manifest.num_bytes)
        try:
            if saved.model:
                _show(saved.model, self._checkpoint)
            self._prune()
        except OSError as error:  # the savepoint is whole all the same
            log.warning("checkpoint.failed", why=f"{error.filename}: {error.strerror}")
        return saved

    def _prune(self) -> None:
        """What is older than the newest whole ones goes; under another name first, so that none is
        half there under its own."""
        sealed = [path for path in self._all() if not path.suffix]
        whole = sorted(path for path in sealed if path.name not in self._broken)
        for old in whole[: -self._keep]:
            old.rename(gone := old.with_suffix(_GONE))
            shutil.rmtree(gone, ignore_errors=True)

    def _sweep(self, part: Path) -> None:
        """Remove what earlier lives left half written or half removed."""
        for path in self._all():
            if path.suffix and path != part:
                shutil.rmtree(path, ignore_errors=True)

    def _next_number(self) -> int:
        numbers = (path.name.partition("-")[0] for path in self._all())
        found = (int(number) for number in numbers if number.isdecimal())
        self._number = 1 + max([self._number, *found])
        return self._number

    def _all(self) -> list[Path]:
        try:
            return [path for path in self.folder.iterdir() if path.name[:1].isdecimal()]
        except FileNotFoundError:
            return []

    def _fail(self, why: str) -> None:
        log.error("savepoint.failed", why=why, fix="the journal keeps what is needed until one is")


def _proven(folder: Path) -> Saved:
    num_bytes = prove(folder).num_bytes
    path = folder / _STATE
    try:
        return Saved(folder, msgspec.json.decode(path.read_bytes(), type=LoopState), num_bytes)
    except (OSError, msgspec.MsgspecError) as error:
        raise SavepointError(f"{path}: is not what this rollmesh writes: {error}") from None


def _show(model: Path, folder: Path) -> None:
    """The files of `model` under the name of `folder` as well."""
    part = begin_folder(folder)
    for path in model.iterdir():
        try:
            os.link(path, part / path.name)
        except OSError:  # a file system without hard links
            shutil.copyfile(path, part / path.name)
    end_folder(folder)
