"""The policy version: minted here, laid out for the carriers, brought to the engines one at a time.

    IDLE -> LAID -> PUBLISHING -> IDLE        (a failed publication is IDLE too, and says so)

Invariants: a policy version is a publish sequence number and is never used twice; a folder is whole
or not there; the newest published folder always exists, so an engine can join from it, and so does
one that an engine is loading. Training does not wait for a publication, only the next publication
does. Driven by the train loop.
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
from rollmesh.trainer.weights.events import Probe, PublishReport

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


class Weights:
    """Numbers, folders and publications of the policy's weights."""

    def __init__(
        self,
        folder: Path,
        background: BackgroundLoop,
        is_loading: Callable[[Path], bool] = lambda _: False,
    ) -> None:
        """`is_loading` says of a version's folder whether an engine is reading it."""
        self._folder = folder
        self._background = background
        self._is_loading = is_loading
        self._running: _Publication | None = None
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
        """The step whose weights have just become what engines sample with, else None.

        Waits up to `timeout_s`. A failed publication is logged; the next version tries anew.
        ModelError where the weights cannot be written and engines wait for the file.
        """
        running = self._running
        if running is None:
            return None
        try:
            report = running.future.result(timeout_s)
        except concurrent.futures.TimeoutError:
            return None
        except EngineError as error:
            log.warning("weights.failed", policy_version=running.policy_version, error=str(error))
            self._running = None
            return None
        self._running = None
        log.info("weights.published", policy_version=running.policy_version, report=str(report))
        self._prune()
        return running.step

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
