"""Policy versions: number them, write their weights, and publish one after the other.

    IDLE -> STORED -> PUBLISHING -> IDLE
                          |          ^ an engine accepts it later, or a newer version does
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
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from rollmesh.core.errors import EngineError, PublishError
from rollmesh.core.logs import get_logger
from rollmesh.engine.shared_memory import SharedSegment
from rollmesh.trainer.reports.records import RunRecords
from rollmesh.trainer.weights.publisher import PublishReport, PublishState
from rollmesh.trainer.weights.verdicts import Probe

log = get_logger()

PublishFn = Callable[
    [int, Path, Probe, tuple[SharedSegment, ...]], Coroutine[Any, Any, PublishReport]
]
"""Publish a policy version: complete its folder from the parts, bring it to all engines, and check
them by the probe."""

KEPT_VERSIONS = 2
"""Folders that are kept: the newest, and the one before it, which an engine may just have been
sent."""


class BackgroundLoop:
    """An event loop on its own thread, for work that continues while a step computes."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Coroutine[Any, Any, PublishReport]
    ) -> "concurrent.futures.Future[PublishReport]":
        """Start `work` on the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def post(self, work: Callable[[], None]) -> None:
        """Call `work` on the loop soon; anything submitted earlier has begun by then."""
        self._loop.call_soon_threadsafe(work)

    def call(self, work: Coroutine[Any, Any, None], timeout_s: float) -> None:
        """Run `work` on the loop and wait for it."""
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
    """One reason for each engine."""


class WeightVersions:
    """Numbers, folders and publications of the policy's weights."""

    def __init__(
        self,
        folder: Path,
        background: BackgroundLoop,
        is_loading: Callable[[Path], bool] = lambda _: False,
        fleet: PublishState | None = None,
    ) -> None:
        """`is_loading` returns whether an engine is reading a version's folder; `fleet` is updated
        by the publisher."""
        self._folder = folder
        self._background = background
        self._is_loading = is_loading
        self.fleet = fleet or PublishState()
        self._running: _Publication | None = None
        self.refusal: Refusal | None = None
        """The last publication if no engine has accepted it, else None."""
        self.policy_version = 0
        """The last one assigned."""
        self._remove_partial()

    def next_folder(self) -> Path:
        """Assign the next policy version and return the folder for its weights."""
        assert self._running is None, "one publication at a time"
        self.policy_version += 1
        return self._folder / f"v{self.policy_version:06d}"

    def publish(
        self,
        step: int,
        folder: Path,
        parts: tuple[SharedSegment, ...],
        publish_fn: PublishFn,
        probe: Probe,
    ) -> None:
        """Start to publish the weights after `step` steps. They are in `parts`, which must not
        change until the publication ends, or are complete in `folder`."""
        future = self._background.submit(publish_fn(self.policy_version, folder, probe, parts))
        self._running = _Publication(self.policy_version, step, future)

    def settled(self, timeout_s: float = 0.0) -> int | None:
        """Return the step whose weights engines have just begun to sample with, else None.

        Waits up to `timeout_s`. A publication that no engine accepted is a `refusal` until an
        engine accepts it or a newer one replaces it. ModelError if the weights cannot be written
        and engines wait for the file.
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
        """Complete folders, oldest first."""
        numbers = {path: path.name[1:] for path in self._folder.glob("v*")}
        whole = [path for path, number in numbers.items() if number.isdecimal()]
        return sorted(whole, key=lambda path: int(numbers[path]))

    def _remove_partial(self) -> None:
        """Remove partial folders of a killed trainer; an engine may be joining from complete
        ones."""
        for partial in [*self._folder.glob("v*.part"), *self._folder.glob("v*.old")]:
            shutil.rmtree(partial, ignore_errors=True)


NO_STEP = -1
"""The step of metrics.jsonl rows that belong to no train step."""
REFUSAL_FIX = "it is retried; the engines' own logs may show more"


class RefusalMonitor:
    """Report publications that no engine accepts, and end the run if none is accepted for too long.

    Each refusal is logged as an error and written as a row of metrics.jsonl (`refused`, without a
    train step). Time in which all engines sleep does not count.
    """

    def __init__(self, records: RunRecords, timeout_s: float) -> None:
        """`timeout_s` is how long a run continues while no engine accepts a publication."""
        self._records = records
        self._timeout_s = timeout_s
        self._last: Refusal | None = None
        self._since_s = 0.0

    def observe(self, refusal: Refusal | None, *, all_asleep: bool) -> None:
        """Process the outcome of the last publication; PublishError if none was accepted for too
        long."""
        now_s = time.monotonic()
        if refusal is not self._last:
            if self._last is None:
                self._since_s = now_s
            self._report(refusal)
            self._last = refusal
        if refusal is None or all_asleep:
            self._since_s = now_s
        elif now_s >= self._since_s + self._timeout_s:
            raise PublishError(
                f"publish.accept_timeout_s = {self._timeout_s:g}: no engine accepted new weights "
                f"for so long; version {refusal.policy_version}: {refusal.reason}; start the "
                "engines again, or raise publish.probe_tolerance if they are known to be right, "
                "then use --resume"
            )

    def _report(self, refusal: Refusal | None) -> None:
        if refusal:
            error = f"no engine serves: {refusal.reason}"
            policy_version = refusal.policy_version
            log.error(
                "weights.refused", policy_version=policy_version, error=error, fix=REFUSAL_FIX
            )
            self._write(policy_version, refusal.reason)
        else:
            assert self._last
            self._write(self._last.policy_version, "")

    def _write(self, policy_version: int, reason: str) -> None:
        """Write a row that belongs to no train step; an empty reason ends a refusal."""
        row = {"step": NO_STEP, "policy_version": policy_version, "refused": reason}
        self._records.step(row)
        self._records.flush()
