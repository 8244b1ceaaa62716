"""TrainController: one process calls methods of roles that live in N rank processes.

    with TrainController(plan, home) as controller:
        batch = controller.take(batch, step)
        scores = controller.call(Call("reference.score", step=step), batch)
        report = controller.call(Call("actor.train", reduce=REPORT), batch, scores)
        controller.end_step(step)

Arguments are handles and plain values; lists of handles are dealt over the data-parallel heads
(dispatch.py), all else goes to every head, and ranks beside a head get what it got (meeting.py).
Answers become one (answers.py). Invariants: those of crew.py; no tensor passes through here, only
handles; what a step ended is freed at every rank, heads or not, and here, by one broadcast; what is
left is told by rank, tag and bytes, and never raised. A process that a plain torchrun started has
the same methods in plain.py. Driven by a train loop, from any thread.
"""

import concurrent.futures
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Self

import msgspec

from rollmesh.core.logs import get_logger
from rollmesh.tensors.handles import UNTAGGED, RTensor
from rollmesh.tensors.nested import collect, transform
from rollmesh.tensors.segment import SHARED_MEMORY, sweep
from rollmesh.trainer.controller.answers import Reduce, decode_values, encode_values, merge_answers
from rollmesh.trainer.controller.dispatch import Arguments, DispatchRule, HeadShare, split_call
from rollmesh.trainer.controller.hub import Bodies, RankHub
from rollmesh.trainer.controller.rank_group import NO_STEP, RankGroupSettings
from rollmesh.trainer.controller.spec import PlaneSpec, RankSpec, RoleSpec, Topology
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

LEAK_PAUSES_S = (0.001, 0.01, 0.1, 0.3)
"""Between two looks at a leak: 0.2 ms were measured on a quiet machine."""

CONTROLLER = -1
"""Its rank in reports."""


class RankPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which ranks there are, and what each is."""

    topology: Topology
    roles: Mapping[str, RoleSpec]
    device: str = "cpu"
    num_threads: int = 1
    """torch threads of each."""
    plane: PlaneSpec = PlaneSpec()
    """Of each."""
    settings: RankGroupSettings = RankGroupSettings()
    bind: str = "tcp://127.0.0.1:0"
    """Where they dial."""
    folder: str = ""
    """The run's, for logs."""


class RoleCall(msgspec.Struct, frozen=True):
    """Which method, and how its rows are dealt and its answers become one."""

    method: str
    """`role.method`"""
    step: int | None = None
    """Whose the tensors in the answer are, so that they are freed with it. None: of the newest step
    that took an argument, so that whoever computes on a batch leaves nothing behind; UNTAGGED: of
    none, for what has to outlive it."""
    rule: DispatchRule = DispatchRule()
    reduce: Reduce = Reduce()


class TensorUsage(msgspec.Struct, frozen=True):
    """What all processes hold of tensors."""

    processes: tuple[RankTensors, ...]
    """The controller's own first, then those of the ranks that said it."""
    missing: tuple[int, ...]
    """Ranks that did not."""
    leaks: tuple[Leak, ...]
    num_cleared: int = 0
    """Shards that were freed at their owners, by id."""


class TrainController:
    """See the module."""

    def __init__(
        self,
        plan: RankPlan,
        home: TensorRuntime,
        keys: Keys | None = None,
        staleness: Staleness | None = None,
    ) -> None:
        """`home` is this process's own; `staleness` paces what is trained here. AddressError where
        `plan.bind` is taken, or an address needs keys."""
        check_bind(plan.plane.bind, keys)
        self._plan = plan
        self._home = home
        self._plane = home.plane
        self._heads = plan.topology.heads()
        self._elsewhere = OtherOwners(home.plane)
        self._staleness = staleness
        self._hub = RankHub(plan.bind, keys, plan.settings, self._specs)
        weakref.finalize(self, self._hub.let_go).atexit = False
        self._ended_step = NO_STEP

    def start(self) -> None:
        """Start the ranks, and wait until all are ready; RankGone where one cannot be."""
        self._hub.start()
        try:
            self._hub.formed.result()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all ranks."""
        self._hub.close("the controller is closed")
        if SHARED_MEMORY.is_dir():
            sweep(SHARED_MEMORY)  # after those that were killed

    @property
    def staleness(self) -> Staleness | None:
        """What paces the batches that are trained here, to look at; None where nothing does."""
        return self._staleness

    def take(self, batch: Any, step: int) -> Any:
        """`batch` is `step`'s from now on, and freed when that ends; handles that say so.

        The step is stamped in the owner of each shard, whoever that is: this process, a rank, or
        another. TensorError for a step that has ended, ShardMissing for the first shard that is not
        there, when all others are taken; OwnerGone.
        """
        handles = collect(batch, RTensor)
        self._elsewhere.note({each.owner for each in handles} - self._told_by_word(), step)
        self._plane.take(handles, step)
        return transform(batch, RTensor, lambda found: [each.tagged(step) for each in found])

    def call(self, what: RoleCall | str, *args: Any, **kwargs: Any) -> Any:
        """Call a role's method at all ranks, and wait for what they answer together.

        Tensors in the answer are handles, owned by the ranks. DispatchError where rows or answers
        do not fit; CallFailed where it cannot be run, or raised, at a rank; RankGone where one is
        gone.
        """
        return self.begin(what, *args, **kwargs).result()

    def begin(self, what: RoleCall | str, *args: Any, **kwargs: Any) -> "PendingCall":
        """The same without the wait: arguments are fetched while an earlier call runs."""
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
        """Free all of `step` and of those before it, everywhere, and look at what is left.

        A leak is a warning that names rank, tag and bytes; nothing is raised.
        """
        self._ended_step = max(self._ended_step, step)
        self._plane.end_step(step)
        self._elsewhere.end_step(step)
        return self._look()

    def clear_batches(self, *targets: Any) -> TensorUsage:
        """Free the shards of `targets` everywhere, and look at what is left; without targets, only
        look."""
        num_cleared = clear_everywhere(self._plane, self._hub, targets)
        return msgspec.structs.replace(self._look(), num_cleared=num_cleared)

    def pids(self) -> list[int]:
        """Of the ranks' processes."""
        return self._hub.pids()

    def _told_by_word(self) -> set[str]:
        """Owners that learn of a step's end without being asked: this process and the ranks."""
        return self._hub.owners() | {self._home.address, ""}

    def _look(self) -> TensorUsage:
        """What all processes hold; leaks are logged.

        Gloo may hold a tensor for a while after the collective has returned: a leak is reported if
        it is still there after LEAK_PAUSES_S.
        """
        now = self._held()
        for pause_s in LEAK_PAUSES_S:
            if not now.leaks:
                break
            time.sleep(pause_s)
            now = self._held()
        for leak in now.leaks:
            log.warning("tensors.leaked", rank=leak.rank, tag=leak.tag, bytes=leak.num_bytes)
        for rank in now.missing:
            log.warning("tensors.untold", rank=rank)
        if not now.leaks and not now.missing:
            log.debug("tensors.clean", ended_step=self._ended_step)
        return now

    def _held(self) -> TensorUsage:
        self._home.settle()
        # By the first answers ranks have told each other what they look at no longer, so that the
        # owners among them count right from then on.
        self._hub.ask(self._ended_step, b"").result()
        told = self._hub.ask(self._ended_step, b"").result()
        own = RankTensors(CONTROLLER, *held_tensors(self._plane))
        others = [RankTensors(each.rank, each.stored, each.buffered) for each in told.told]
        return TensorUsage(
            (own, *others),
            told.missing,
            tuple(find_leaks((own, *others), self._ended_step, self._hub.num_open)),
        )

    def _specs(self, address: str) -> Sequence[RankSpec]:
        plan = self._plan
        return [
            RankSpec(
                controller=address,
                rank=rank,
                topology=plan.topology,
                roles=dict(plan.roles),
                device=plan.device,
                num_threads=plan.num_threads,
                plane=plan.plane,
                beat_s=plan.settings.beat_s,
                silence_s=plan.settings.silence_s,
                folder=plan.folder,
            )
            for rank in range(plan.topology.num_ranks)
        ]


class PendingCall:
    """A call that is under way."""

    def __init__(
        self,
        controller: TrainController,
        bodies: "concurrent.futures.Future[Bodies]",
        heads: Sequence[int],
        shares: Sequence[HeadShare] | None,
        reduce: Reduce,
    ) -> None:
        self._controller = controller  # which nobody lets go of before its call has ended
        self._bodies = bodies
        self._heads = heads
        self._shares = shares
        self._reduce = reduce

    def result(self) -> Any:
        """What all heads answered, as one; raises as `call` does."""
        bodies = self._bodies.result()
        answers = [decode_values(bodies[head]) for head in self._heads]
        return merge_answers(answers, self._shares, self._reduce)


def _newest_step(values: Any) -> int:
    return max((each.step for each in collect(values, RTensor)), default=UNTAGGED)
