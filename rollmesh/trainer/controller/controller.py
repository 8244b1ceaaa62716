"""TrainController: one process calls methods of roles that live in N rank processes.

    with TrainController(plan, tensor_runtime) as controller:
        batch = controller.take(batch, step)
        scores = controller.call(RoleCall("reference.score", step=step), batch)
        report = controller.call(RoleCall("actor.train", reduce=REPORT), batch, scores)
        controller.end_step(step)

- Arguments are handles and plain values. Lists of handles are split over the data-parallel heads
  (dispatch.py); everything else goes to every head, and the other ranks of its group get a copy
  (rendezvous.py). Answers are merged (answers.py). No tensor passes through this process.
- An ended step is freed at every rank and here. Tensors that are left are logged with rank, tag and
  bytes; nothing raises.
- torchrun.py has the same methods for processes that a plain torchrun started.
"""

import concurrent.futures
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec
import torch

from rollmesh.core.errors import RankError
from rollmesh.core.logs import get_logger
from rollmesh.tensors.handles import UNTAGGED, RTensor, collect, transform
from rollmesh.tensors.segment import SHARED_MEMORY, sweep
from rollmesh.trainer.controller.answers import Reduce, decode_values, encode_values, merge_answers
from rollmesh.trainer.controller.dispatch import Arguments, DispatchRule, HeadShare, split_call
from rollmesh.trainer.controller.hub import Bodies, RankHub
from rollmesh.trainer.controller.rank_group import NO_STEP, RankGroupSettings
from rollmesh.trainer.controller.spec import (
    PlaneSpec,
    RankSpec,
    RoleSpec,
    Topology,
    rank_device,
)
from rollmesh.trainer.controller.tensor_runtime import (
    Leak,
    OtherOwners,
    RankTensors,
    TensorRuntime,
    clear_everywhere,
    find_leaks,
    held_tensors,
)
from rollmesh.trainer.staleness import Staleness
from rollmesh.wire.keys import Keys, check_bind

log = get_logger()

STOP_LOOK_S = 0.25
"""Between two looks at a stop while ranks start."""
LEAK_PAUSES_S = (0.001, 0.01, 0.1, 0.3)
"""Between two looks at a leak: 0.2 ms were measured on a quiet machine."""

CONTROLLER = -1
"""Rank of the controller's own process in reports."""


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The ranks, their roles and settings."""

    topology: Topology
    roles: Mapping[str, RoleSpec]
    device: str = "cpu"
    num_threads: int = 1
    """torch threads of each rank."""
    plane: PlaneSpec = PlaneSpec()
    """Data plane of each rank."""
    settings: RankGroupSettings = RankGroupSettings()
    bind: str = "tcp://127.0.0.1:0"
    """Address that the ranks dial."""
    num_local: int | None = None
    """The first ranks that the controller starts itself (default: all). The others are started
    elsewhere, by torchrun or `rollmesh rank`, and dial in."""
    folder: str = ""
    """Run folder, for logs."""

    def spec(self, address: str, rank: int, device: str) -> RankSpec:
        """Return the description of one rank, which computes on `device`."""
        return RankSpec(
            controller=address,
            rank=rank,
            topology=self.topology,
            roles=dict(self.roles),
            device=device,
            num_threads=self.num_threads,
            plane=self.plane,
            start_s=self.settings.start_s,
            beat_s=self.settings.beat_s,
            silence_s=self.settings.silence_s,
            folder=self.folder,
        )


class RoleCall(msgspec.Struct, frozen=True):
    """A method, and how its rows are split and its answers merged."""

    method: str
    """`role.method`"""
    step: int | None = None
    """The step that frees the tensors of the answer. None: the newest step that took an argument,
    so that computing on a batch leaves nothing behind; UNTAGGED: no step."""
    rule: DispatchRule = DispatchRule()
    reduce: Reduce = Reduce()


class TensorUsage(msgspec.Struct, frozen=True):
    """The tensors that all processes hold."""

    processes: tuple[RankTensors, ...]
    """The controller's process first, then the ranks that reported."""
    missing: tuple[int, ...]
    """Ranks that did not report."""
    leaks: tuple[Leak, ...]
    num_cleared: int = 0
    """Shards that were freed at their owners."""


class TrainController:
    """The controller of the ranks of one plan; usable from any thread."""

    def __init__(
        self,
        plan: RankPlan,
        tensor_runtime: TensorRuntime,
        keys: Keys | None = None,
        staleness: Staleness | None = None,
    ) -> None:
        """`tensor_runtime` is that of this process; `staleness` paces the training.

        Raises AddressError if `plan.bind` is taken, or an address needs keys; ConfigError if a rank
        that is started here has no device.
        """
        check_bind(plan.plane.bind or plan.bind, keys)
        self._plan = plan
        self._devices = devices_of(plan)
        self._tensor_runtime = tensor_runtime
        self._plane = tensor_runtime.plane
        self._heads = plan.topology.heads()
        self._other_owners = OtherOwners(tensor_runtime.plane)
        self._staleness = staleness
        self._hub = RankHub(plan.bind, keys, plan.settings, self._specs, plan.num_local)
        weakref.finalize(self, self._hub.abandon).atexit = False
        self._ended_step = NO_STEP

    @property
    def address(self) -> str:
        """Address that ranks dial."""
        return self._hub.address

    def start(self, stop: threading.Event | None = None) -> None:
        """Start the ranks and wait until all are ready; raise RankGone if one cannot be, RankError
        if `stop` is set first."""
        self._hub.start()
        try:
            while not self._is_formed():
                if stop and stop.is_set():
                    raise RankError("stopped before all ranks were ready")
        except BaseException:
            self.close()
            raise

    def _is_formed(self) -> bool:
        try:
            self._hub.formed.result(STOP_LOOK_S)
        except TimeoutError:
            return False
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks."""
        self._hub.close("the controller is closed")
        if SHARED_MEMORY.is_dir():
            sweep(SHARED_MEMORY)  # of ranks that were killed

    @property
    def staleness(self) -> Staleness | None:
        """The pacing of the batches that are trained here, read-only; None if there is none."""
        return self._staleness

    def take(self, batch: Any, step: int) -> Any:
        """Assign `batch` to `step`, whose end frees it; return it with tagged handles.

        The owner of each shard (this process, a rank, or another process) records the step. Raises
        TensorError for a step that has ended, ShardMissing for the first missing shard, after all
        others were taken, and OwnerGone.
        """
        handles = collect(batch, RTensor)
        self._other_owners.note({each.owner for each in handles} - self._notified_owners(), step)
        self._plane.take(handles, step)
        return transform(batch, RTensor, lambda found: [each.tagged(step) for each in found])

    def call(self, what: RoleCall | str, *args: Any, **kwargs: Any) -> Any:
        """Call a role's method at all ranks, and return their merged answer.

        Tensors in the answer are handles, owned by the ranks. Raises DispatchError if rows or
        answers do not fit, CallFailed if a rank cannot run the call or its method raises, and
        RankGone if a rank is lost.
        """
        return self.begin(what, *args, **kwargs).result()

    def begin(self, what: RoleCall | str, *args: Any, **kwargs: Any) -> "PendingCall":
        """Start a call without waiting; its arguments are fetched while an earlier call runs."""
        call = RoleCall(what) if isinstance(what, str) else what
        dispatch = split_call(Arguments(args, kwargs), len(self._heads), call.rule)
        bodies = [b""] * self._plan.topology.num_ranks
        for at, (head, part) in enumerate(zip(self._heads, dispatch.parts, strict=True)):
            share = dispatch.shares[at] if dispatch.shares else None
            rows = (len(share.rows), share.num_real) if share else None
            bodies[head] = encode_values((part.args, part.kwargs, rows))
        role, _, method = call.method.partition(".")
        step = _newest_step((args, kwargs)) if call.step is None else call.step
        answers = self._hub.call(role, method, step, tuple(bodies))
        return PendingCall(self, answers, self._heads, dispatch.shares, call.reduce)

    def end_step(self, step: int) -> TensorUsage:
        """Free all tensors of steps up to `step`, everywhere, and return what is left.

        A leak is logged as a warning with rank, tag and bytes.
        """
        self._ended_step = max(self._ended_step, step)
        self._plane.end_step(step)
        self._other_owners.end_step(step)
        return self._check_tensors()

    def clear_batches(self, *targets: Any) -> TensorUsage:
        """Free the shards of `targets` everywhere, and return what is left; without targets, free
        nothing."""
        num_cleared = clear_everywhere(self._plane, self._hub, targets)
        return msgspec.structs.replace(self._check_tensors(), num_cleared=num_cleared)

    def pids(self) -> list[int]:
        """Process ids of the ranks that were started here."""
        return self._hub.pids()

    def _notified_owners(self) -> set[str]:
        """Owners that learn of a step's end without a call: this process and the ranks."""
        return self._hub.owners() | {self._tensor_runtime.address, ""}

    def _check_tensors(self) -> TensorUsage:
        """Return what all processes hold, and log leaks.

        Gloo may hold a tensor for a while after a collective has returned, so a leak is reported if
        it is still there after LEAK_PAUSES_S.
        """
        now = self._usage()
        for pause_s in LEAK_PAUSES_S:
            if not now.leaks:
                break
            time.sleep(pause_s)
            now = self._usage()
        for leak in now.leaks:
            log.warning("tensors.leaked", rank=leak.rank, tag=leak.tag, bytes=leak.num_bytes)
        for rank in now.missing:
            log.warning("tensors.unreported", rank=rank)
        if not now.leaks and not now.missing:
            log.debug("tensors.clean", ended_step=self._ended_step)
        return now

    def _usage(self) -> TensorUsage:
        self._tensor_runtime.settle()
        # After the first query all ranks have reported to each other what they no longer read, so
        # the second one counts correctly.
        self._hub.query_tensors(self._ended_step, b"").result()
        reports = self._hub.query_tensors(self._ended_step, b"").result()
        own = RankTensors(CONTROLLER, *held_tensors(self._plane))
        others = [RankTensors(each.rank, each.stored, each.buffered) for each in reports.reports]
        return TensorUsage(
            (own, *others),
            reports.missing,
            tuple(find_leaks((own, *others), self._ended_step, self._hub.num_open)),
        )

    def _specs(self, address: str) -> Sequence[RankSpec]:
        """The specs of all ranks; only those of ranks that are started here are used whole."""
        return [self._plan.spec(address, rank, device) for rank, device in enumerate(self._devices)]


def devices_of(plan: RankPlan) -> list[str]:
    """Return the device of each rank: its own for those that are started here."""
    num_ranks, num_visible = plan.topology.num_ranks, torch.cuda.device_count()
    num_local = num_ranks if plan.num_local is None else plan.num_local
    local = [rank_device(plan.device, rank, num_visible, num_local) for rank in range(num_local)]
    return local + [plan.device] * (num_ranks - num_local)


class PendingCall:
    """A call that was started; `result` waits for it."""

    def __init__(
        self,
        controller: TrainController,
        bodies: "concurrent.futures.Future[Bodies]",
        heads: Sequence[int],
        shares: Sequence[HeadShare] | None,
        reduce: Reduce,
    ) -> None:
        self._controller = controller  # keeps it alive until the call has ended
        self._bodies = bodies
        self._heads = heads
        self._shares = shares
        self._reduce = reduce

    def result(self) -> Any:
        """Return the merged answer of all heads; raise as `call` does."""
        bodies = self._bodies.result()
        answers = [decode_values(bodies[head]) for head in self._heads]
        return merge_answers(answers, self._shares, self._reduce)


def _newest_step(values: Any) -> int:
    return max((each.step for each in collect(values, RTensor)), default=UNTAGGED)
