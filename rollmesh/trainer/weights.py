"""The policy version: minted here, written as a folder, brought to the engines one at a time.

    IDLE -> SAVED -> PUBLISHING -> IDLE        (a failed publication is IDLE too, and says so)

Invariants: a policy version is a publish sequence number and is never used twice; a folder is whole
or not there; the newest published folder always exists, so an engine can join from it. Training
does not wait for a publication, only the next publication does. Driven by the train loop.
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
from rollmesh.trainer.publisher import Probe, PublishReport

log = get_logger()

Bring = Callable[[int, Path, Probe], Coroutine[Any, Any, PublishReport]]
"""Bring the weights in a folder to all engines under a policy version, and try them by a probe."""


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

    def __init__(self, folder: Path, keep_versions: int, background: BackgroundLoop) -> None:
        self._folder = folder
        self._keep_versions = keep_versions
        self._background = background
        self._running: _Publication | None = None
        self.policy_version = 0
        """The last one minted."""

    def next_folder(self) -> Path:
        """Mint the next policy version; its weights belong into this folder, written atomically."""
        assert self._running is None, "one publication at a time"
        self.policy_version += 1
        return self._folder / f"v{self.policy_version:06d}"

    def publish(self, step: int, folder: Path, bring: Bring, probe: Probe) -> None:
        """Begin to bring the weights after `step` steps, saved in `folder`, to the engines."""
        future = self._background.submit(bring(self.policy_version, folder, probe))
        self._running = _Publication(self.policy_version, step, future)

    def settled(self, timeout_s: float = 0.0) -> int | None:
        """The step whose weights have just become what engines sample with, else None.

        Waits up to `timeout_s`. A failed publication is logged; the next version tries anew.
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
        for old in sorted(self._folder.glob("v*"))[: -self._keep_versions]:
            shutil.rmtree(old, ignore_errors=True)
