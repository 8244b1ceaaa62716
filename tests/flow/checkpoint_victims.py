"""Kill processes during a checkpoint: python -m tests.flow.checkpoint_victims FOLDER

A first process finds two checkpoints, begins a third and is killed just before it runs a certain
line of checkpoints/ or checkpoint.py, on any thread. A second process must find the second or third
checkpoint intact, restore it, and save once more. There is one pair of processes for each
intermediate state of the disk (names and sizes); the first process is killed at the first line that
runs in that state. Prints a row for each pair: the line, the restored step, and the fault, if any.
The processes are forks of this one, which never starts a thread.
"""

import contextlib
import functools
import os
import shutil
import signal
import sys
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from rollmesh.trainer import checkpoints
from rollmesh.trainer.checkpoints.manifest import verify
from rollmesh.trainer.checkpoints.recovery_plan import LoopState
from rollmesh.trainer.checkpoints.store import CheckpointStore
from rollmesh.trainer.models import folders
from tests.unit.trainer.checkpoints.trained import Trained, same

WATCHED = (str(Path(checkpoints.__file__).parent), str(folders.__file__))
FIRST, EARLIER, LATER, AGAIN = 1, 2, 3, 4
"""Steps done at the checkpoints."""
WAIT_S = 60.0

Line = tuple[str, int]
Moment = tuple[str, int, int]
"""A line, and the number of times that it ran before."""


class Row(msgspec.Struct):
    """The result of one pair of processes."""

    line: str
    was_killed: bool
    found_step: int
    fault: str


class Fuse:
    """A trace function (sys.settrace) that sees each watched line before it runs."""

    def __init__(self, run: Path, at: Moment | None = None) -> None:
        self.stages: dict[frozenset[tuple[str, int]], Moment] = {}
        """By the state of the disk, the first moment with that state."""
        self._run = run
        self._at = at
        self._counts = Counter[Line]()
        self._lock = threading.Lock()

    def __enter__(self) -> "Fuse":
        threading.settrace(self)
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)

    def leave_this_thread(self) -> None:
        """Trace only the threads that write: a waiting thread runs its lines a varying number of
        times."""
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, _: Any) -> "Fuse | None":
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        if event == "line":
            line = (frame.f_code.co_filename, frame.f_lineno)
            with self._lock:
                moment = (*line, self._counts[line])
                if moment == self._at:
                    os.kill(os.getpid(), signal.SIGKILL)
                self._counts[line] += 1
                if not self._at:
                    self.stages.setdefault(frozenset(found(self._run)), moment)
        return self


class Subject(Trained):
    """Its files look like a model folder to the store."""

    def snapshot(self, folder: Path) -> None:
        self.rank_snapshot.take(folder, lambda model: (model / "config.json").touch())


def found(run: Path) -> Iterator[tuple[str, int]]:
    """All files and folders with their sizes; concurrent removals may or may not show."""
    for folder, names, files in os.walk(run):
        for name in (*names, *files):
            with contextlib.suppress(FileNotFoundError):
                yield f"{folder}/{name}", os.stat(f"{folder}/{name}").st_size


def subject(num_steps: int) -> Subject:
    """The target after so many steps."""
    trained = Subject()
    trained.train(num_steps)
    return trained


def begun(run: Path, num_steps: int, trained: Trained) -> CheckpointStore:
    """Begin a checkpoint as the loop does."""
    store = CheckpointStore(run)
    store.newest()
    assert store.begin(LoopState(num_steps=num_steps), trained)
    return store


def save(run: Path, num_steps: int, trained: Trained) -> None:
    """Save and wait for the end."""
    assert begun(run, num_steps, trained).settled(WAIT_S) is not None


def look(run: Path, expected: dict[int, Any]) -> int:
    """Check what the next process finds; AssertionError if it is not intact."""
    store, trained = CheckpointStore(run), Subject()
    newest = store.newest()
    assert newest is not None, "nothing was found"
    num_steps = store.restore(newest, trained).num_steps
    assert same(trained.values(), expected[num_steps]), "other weights were restored"
    assert store.begin(LoopState(num_steps=AGAIN), trained)
    saved = store.settled(WAIT_S)
    assert saved is not None, "the next checkpoint failed"
    left = sorted(path.name for path in (run / "savepoints").iterdir())
    assert saved.folder.name == left[-1], left
    assert len(left) == 2, left
    for name in left:
        verify(run / "savepoints" / name)
    assert {path.name for path in run.iterdir()} == {"savepoints", "checkpoint"}
    weights = "model/model.safetensors"
    assert (run / "checkpoint" / Path(weights).name).samefile(saved.folder / weights)
    return num_steps


def in_a_fork(work: Callable[[], object]) -> tuple[int, bytes]:
    """Run in a fork; return its wait status, and its result or exception."""
    reading, writing = os.pipe()
    if (pid := os.fork()) == 0:
        try:
            result = msgspec.json.encode(work())
        except BaseException:  # noqa: BLE001 - door: a fork reports every error
            result = msgspec.json.encode("".join(traceback.format_exc(limit=-2)))
        os.write(writing, result)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        result = pipe.read()
    return os.waitpid(pid, 0)[1], result


def main() -> None:
    folder = Path(sys.argv[1])
    trained = {steps: subject(steps) for steps in (FIRST, EARLIER, LATER)}
    expected = {steps: each.values() for steps, each in trained.items()}
    for steps in (FIRST, EARLIER):
        in_a_fork(functools.partial(save, folder / "template", steps, trained[steps]))

    def victim(run: Path, at: Moment | None) -> list[Moment]:
        with Fuse(run, at) as fuse:
            store = begun(run, LATER, trained[LATER])
            fuse.leave_this_thread()
            assert store.settled(WAIT_S) is not None
        return list(fuse.stages.values())

    def new(name: str) -> Path:
        shutil.copytree(folder / "template", folder / name)
        return folder / name

    run = new("rehearsal")
    _, answer = in_a_fork(functools.partial(victim, run, None))
    for number, moment in enumerate(msgspec.json.decode(answer, type=list[Moment])):
        run = new(str(number))
        status, _ = in_a_fork(functools.partial(victim, run, moment))
        _, answer = in_a_fork(functools.partial(look, run, expected))
        result = msgspec.json.decode(answer)
        is_good = isinstance(result, int)
        row = Row(
            line=f"{Path(moment[0]).name}:{moment[1]}, {moment[2]} times before",
            was_killed=os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL,
            found_step=result if is_good else 0,
            fault="" if is_good else result,
        )
        sys.stdout.write(msgspec.json.encode(row).decode() + "\n")
        sys.stdout.flush()
        shutil.rmtree(run)


if __name__ == "__main__":
    main()
