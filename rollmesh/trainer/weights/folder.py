"""Policy versions: number them, write their weights, and publish one after the other.

    IDLE -> LAID -> PUBLISHING -> IDLE
                        |          | an engine accepts it after all, or a newer one
                        +-> REFUSED (no engine accepted it; the publisher keeps trying)

- A policy version is a publish sequence number and is never used twice.
- A folder is complete or absent. The newest published one always exists, so that an engine can join
  from it, and so does one that an engine is loading.
- Training does not wait for a publication; only the next publication does.
"""

import asyncio
import concurrent.futures
import shutil
import threading
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.errors import EngineError
from rollmesh.core.logs import get_logger
from rollmesh.engine.in_memory import Part
from rollmesh.trainer.weights.events import FleetState, Probe, PublishReport

log = get_logger()

Bring = Callable[[int, Path, Probe, tuple[Part, ...]], Coroutine[Any, Any, PublishReport]]
"""Write the weights of a policy version to its folder, from where they lie, bring them to all
engines, and try those by a probe."""

KEPT_VERSIONS = 2
"""Folders that stay: the newest, and the one before it, which an engine may have just been told."""


class BackgroundLoop:
    """An event loop on a thread of its own, for what must go on while a step computes."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Coroutine[Any, Any, PublishReport]
    ) -> "concurrent.futures.Future[PublishReport]":
        """Start `work` there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def post(self, work: Callable[[], None]) -> None:
        """Do it there, soon; what was submitted before it has begun by then."""
        self._loop.call_soon_threadsafe(work)

    def call(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Run `work` there and wait for it."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout_s)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class _Publication(msgspec.Struct):
    policy_version: int
    step: int
    future: "concurrent.futures.Future[PublishReport]"


class Refusal(msgspec.Struct, frozen=True):
    """A publication that no engine has accepted."""

    policy_version: int
    step: int
    reason: str
    """Why, by engine."""


class Weights:
    """Numbers, folders and publications of the policy's weights."""

    def __init__(
        self,
        folder: Path,
        background: BackgroundLoop,
        is_loading: Callable[[Path], bool] = lambda _: False,
        fleet: FleetState | None = None,
    ) -> None:
        """`is_loading` returns whether an engine is reading that version's folder; `fleet` is kept
        by the publisher."""
        self._folder = folder
        self._background = background
        self._is_loading = is_loading
        self.fleet = fleet or FleetState()
        self._running: _Publication | None = None
        self.refusal: Refusal | None = None
        """The last publication, where no engine has accepted it; None where one has."""
        self.policy_version = 0
        """The last one minted."""
        self._sweep()

    def next_folder(self) -> Path:
        """Mint the next policy version; its weights belong into this folder."""
        assert self._running is None, "one publication at a time"
        self.policy_version += 1
        return self._folder / f"v{self.policy_version:06d}"

    def publish(
        self, step: int, folder: Path, parts: tuple[Part, ...], bring: Bring, probe: Probe
    ) -> None:
        """Begin to bring the weights after `step` steps to the engines; they lie in `parts`, which
        stay as they are until it is over, or are all in `folder`."""
        future = self._background.submit(bring(self.policy_version, folder, probe, parts))
        self._running = _Publication(self.policy_version, step, future)

    def settled(self, timeout_s: float = 0.0) -> int | None:
        """Return the step whose weights engines have just begun to sample with, else None.

        Waits up to `timeout_s`. A publication that no engine accepted is a `refusal`, until an
        engine accepts it after all or a newer one takes its place. ModelError where the weights
        cannot be written and engines wait for the file.
        """
        if self._running is None:
            return self._accepted_late()
        running = self._running
        try:
            report = running.future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            return None
        except EngineError as error:
            self._running = None
            self.refusal = Refusal(running.policy_version, running.step, str(error))
            return None
        self._running = None
        self._prune()
        if report.is_refused:
            reason = "; ".join(report.failed)
            self.refusal = Refusal(running.policy_version, running.step, reason)
            return self._accepted_late()
        self.refusal = None
        log.info("weights.published", policy_version=running.policy_version, report=str(report))
        return running.step

    def _accepted_late(self) -> int | None:
        """Return the step of a refused publication that an engine has accepted since."""
        refusal = self.refusal
        if refusal is None or self.fleet.accepted_version < refusal.policy_version:
            return None
        self.refusal = None
        log.info("weights.published", policy_version=refusal.policy_version, report="late")
        return refusal.step

    @property
    def is_publishing(self) -> bool:
        return self._running is not None

    def _prune(self) -> None:
        for old in self._versions()[:-KEPT_VERSIONS]:
            if not self._is_loading(old):
                shutil.rmtree(old, ignore_errors=True)

    def _versions(self) -> list[Path]:
        """Whole folders, oldest first."""
        numbers = {path: path.name[1:] for path in self._folder.glob("v*")}
        whole = [path for path, number in numbers.items() if number.isdecimal()]
        return sorted(whole, key=lambda path: int(numbers[path]))

    def _sweep(self) -> None:
        """Remove what a trainer that was killed had begun to write; of older and whole ones an
        engine may be joining."""
        for left in [*self._folder.glob("v*.part"), *self._folder.glob("v*.old")]:
            shutil.rmtree(left, ignore_errors=True)
