"""AsyncRolloutClient: await rollouts like any other call, or stream them as they finish.

    async with AsyncRolloutClient("tcp://host:port") as client:
        finished = await client.run(task, env="guess")
        finished = await client.run_group(task, 8, env="guess", deadline_s=60.0)
        for task in tasks:
            await client.ask(task, 8, env="guess")
        async for arrival in client.stream(): ...

- A group that ended without a result is raised as the error of its code, see `error_of`; `stream`
  returns it as Dropped.
- Cancelling the coroutine cancels the group in the mesh.
- At most MAX_CALLS groups are open, further calls wait. Past MAX_HELD_BYTES untaken results stay in
  the journal, whose budget limits asks.
- A result is returned once, unless the caller of `stream` ended before it asked for the next.
- One object serves all tasks of one event loop. Each process has its own, with its own folder.
"""

import asyncio
import math
import os
import secrets
import tempfile
import time
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Required, Self, TypedDict, Unpack

from rollmesh.core.config import JournalConfig
from rollmesh.core.errors import (
    AttemptsExhausted,
    ClientClosed,
    ConfigError,
    DeadlineExceeded,
    EnvFailedError,
    GroupCancelled,
    GroupError,
    GroupIncomplete,
    Overloaded,
    Quarantined,
)
from rollmesh.core.ids import GroupId
from rollmesh.core.types import EVAL_SAMPLING, SamplingPolicy, Task
from rollmesh.envs.scratch import LOCK, PREFIX, sweep
from rollmesh.serve.client.arrivals import Arrival, Dropped, Finished, RawResult, Unopened
from rollmesh.serve.client.asks import MOMENT_S, PATIENCE_S
from rollmesh.serve.client.client import RolloutClient
from rollmesh.wire.keys import Keys, Role, check_dial, find_keys
from rollmesh.wire.sockets import check_admitted

ERRORS: dict[str, type[GroupError]] = {
    "deadline": DeadlineExceeded,
    "cancelled": GroupCancelled,
    "client_left": GroupCancelled,
    "env_failed": EnvFailedError,
    "attempts_exhausted": AttemptsExhausted,
    "quarantined": Quarantined,
    "infra_error": GroupIncomplete,
}
"""Error classes by the code that a reason begins with."""


def code_of(reason: str) -> str:
    """Return the code of a reason: `deadline` for `deadline: no result within 5 s`."""
    return reason.partition(":")[0]


def error_of(dropped: Dropped) -> GroupError | Overloaded:
    """Return the error to raise for a group that was awaited."""
    code = code_of(dropped.reason)
    if code == "overloaded":
        return Overloaded(f"group {dropped.group_id}: {dropped.reason}", dropped.retry_after_s)
    return ERRORS.get(code, GroupError)(dropped.group_id, dropped.reason, dropped.record)


MAX_CALLS = 4096
"""Limit on groups that were asked for and not handed out."""
MAX_HELD_BYTES = 64 * 2**20
"""Limit on the bytes of results in memory that `stream` has yet to hand out."""

Call = asyncio.Future[Arrival]


class CallOptions(TypedDict, total=False):
    """Options of a call besides its task."""

    env: Required[str]
    """Environment that runs it, by the name that its workers know."""
    sampling: SamplingPolicy
    """Sampling policy; default: that of training, or of evaluation if `is_eval`."""
    seed: int
    """Seed of the sampling; default: a fresh one."""
    deadline_s: float
    """Seconds from the call to its result, waiting included; 0 is no limit."""
    priority: int
    """Higher runs first."""
    is_eval: bool
    patience_s: float
    """Seconds for which a full mesh is asked again; 0 raises Overloaded at once."""


def leave_sweepable(folder: Path) -> None:
    """Link the journal's lock, so that `sweep` removes `folder` if this process is killed."""
    with suppress(OSError):  # this file system has no links: the folder stays
        os.link(folder / "journal" / LOCK, folder / LOCK)


def check_options(options: CallOptions) -> None:
    """Raise TypeError for a missing or unknown option: a mistyped deadline would be none."""
    known = CallOptions.__annotations__
    if unknown := sorted(options.keys() - known):
        raise TypeError(
            f"no such option of a call: {', '.join(unknown)}; it has {', '.join(known)}"
        )
    if "env" not in options:
        raise TypeError("env is missing: the name of the environment that runs the task")


class AsyncRolloutClient:
    """The client; enter it with `async with`."""

    def __init__(
        self,
        router: str,
        folder: Path | None = None,
        *,
        journal: JournalConfig | None = None,
        keys: Keys | None = None,
        bind: str = "",
        advertise: str = "",
        weight: int = 1,
        keep: bool = False,
    ) -> None:
        """Connect; the arguments are RolloutClient's. Without a `folder` the journal is deleted at
        the end.

        Without `keys`, those named by ROLLMESH_KEYS are used, or those of the run under runs/ whose
        router has this address. Raises AddressError if the router refuses them.
        """
        keys = keys or find_keys(router, Role.CLIENT)
        check_dial(router, keys)
        check_admitted(router, keys)
        if keep and folder is None:
            raise ConfigError("keep: name a folder, by which the next client finds what is kept")
        with ExitStack() as undo:
            is_scratch = folder is None
            if folder is None:
                sweep()
                folder = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX)))
            self._client = RolloutClient(
                router,
                journal or JournalConfig(),
                folder,
                keys,
                bind=bind,
                advertise=advertise,
                weight=weight,
                keep=keep,
            )
            undo.callback(self._client.close)
            if is_scratch:
                leave_sweepable(folder)
            self._undo = undo.pop_all()
        self._calls: dict[GroupId, Call | None] = {}
        """Open groups by id; None for those that `stream` hands out."""
        self._ended: deque[Unopened] = deque()
        """Arrivals that `stream` hands out next."""
        self._num_held_bytes = 0
        self._reopened: dict[GroupId, Task] = {}
        self._room = asyncio.Semaphore(MAX_CALLS)
        self._news = asyncio.Event()
        self._is_closed = False
        self._fault: Exception | None = None

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._client.start()
        self._reopened.update(self._client.reopened)
        self._calls.update(dict.fromkeys(self._reopened))
        self._collect()

        def on_arrival() -> None:
            loop.call_soon_threadsafe(self._collect)

        self._client.watch(on_arrival)
        return self

    async def meet_router(self, timeout_s: float) -> bool:
        """The id that the router knows this client by."""
        return await asyncio.to_thread(self._client.meet_router, timeout_s)

    async def __aexit__(self, *_: object) -> None:
        self._client.watch(None)
        self._is_closed = True
        for group_id, call in self._calls.items():
            if call and not call.done():
                why = "cancelled: its client was closed"
                call.set_exception(GroupCancelled(group_id, why))
        self._tell_waiters()
        await asyncio.to_thread(self._undo.close)

    @property
    def reopened(self) -> Mapping[GroupId, Task]:
        """With `keep`: groups that an earlier client on the folder asked for; `stream` returns
        them.
        """
        return self._reopened

    @property
    def num_ended(self) -> int:
        """Number of groups that `stream` can hand out at once."""
        return len(self._ended)

    def why_waiting(self) -> str:
        """Why groups wait, as last sent by the router; '' if it has sent nothing lately."""
        return self._client.why_waiting()

    async def run(self, task: Task, **options: Unpack[CallOptions]) -> Finished:
        """Run one rollout of `task`; see `run_group`."""
        return await self.run_group(task, 1, **options)

    async def run_group(
        self, task: Task, num_samples: int, **options: Unpack[CallOptions]
    ) -> Finished:
        """Run `num_samples` rollouts of `task`; each has its outcome.

        Raises GroupError of the kind that says why there is no result, Overloaded or ClientClosed.
        """
        call: Call = asyncio.get_running_loop().create_future()
        group_id = await self._ask(task, num_samples, call, options)
        try:
            arrival = await call
        except asyncio.CancelledError:
            self._client.cancel(group_id, "no longer awaited")
            raise
        if isinstance(arrival, Dropped):
            raise error_of(arrival)
        return arrival

    async def ask(self, task: Task, num_samples: int, **options: Unpack[CallOptions]) -> GroupId:
        """Ask for a group that `stream` hands out; wait while too many are open.

        Raises Overloaded.
        """
        return await self._ask(task, num_samples, None, options)

    async def stream(self) -> AsyncGenerator[Arrival, None]:
        """Yield the groups asked for by `ask` as they end, until none is open.

        Groups that an earlier client on the folder left come first. Several tasks may stream; each
        group goes to one of them. A caller that leaves the loop at a group has received it.
        """
        while arrival := await self._next_ended():
            try:
                yield arrival
            finally:
                self._client.done_with([arrival.group_id])
                self._let_go(arrival)
                del arrival  # do not keep it alive while the next is awaited

    async def cancel(self, group_id: GroupId, reason: str = "no longer wanted") -> None:
        """End an open group: `stream` hands it out as Dropped. Does nothing if it has ended."""
        self._client.cancel(group_id, reason)

    async def _ask(
        self, task: Task, num_samples: int, call: Call | None, options: CallOptions
    ) -> GroupId:
        check_options(options)
        called_s = time.monotonic()
        patience_s = options.get("patience_s", PATIENCE_S)
        deadline_s = options.get("deadline_s", 0.0)
        try:
            async with asyncio.timeout(min(patience_s, deadline_s or math.inf)):
                await self._room.acquire()
        except TimeoutError:
            raise Overloaded(f"{MAX_CALLS} calls of this client are open", 1.0) from None
        if deadline_s:
            deadline_s = max(deadline_s - (time.monotonic() - called_s), MOMENT_S)
        is_eval = options.get("is_eval", False)
        with ExitStack() as undo:
            undo.callback(self._room.release)
            if self._fault:
                raise self._fault.with_traceback(None)
            if self._is_closed:
                raise ClientClosed("this client was closed: ask before that, or open another")
            group_id = self._client.ask(
                task,
                env=options["env"],
                num_samples=num_samples,
                sampling=options.get("sampling", EVAL_SAMPLING if is_eval else SamplingPolicy()),
                seed=options.get("seed", secrets.randbits(63)),
                is_eval=is_eval,
                priority=options.get("priority", 0),
                deadline_s=deadline_s,
                patience_s=patience_s,
            )
            undo.pop_all()
        self._calls[group_id] = call
        return group_id

    async def _next_ended(self) -> Arrival | None:
        """Return what `stream` hands out next; None if nothing more is to come."""
        while not self._ended:
            if self._fault:
                raise self._fault.with_traceback(None)
            if self._is_closed or None not in self._calls.values():
                return None
            await self._news.wait()
        ended = self._ended.popleft()
        if isinstance(ended, RawResult):
            self._num_held_bytes -= ended.held_bytes
        return self._client.open(ended)

    def _collect(self) -> None:
        """Hand out what has ended; runs on the loop when there is news."""
        try:
            arrivals = self._client.take_unopened()
        except Exception as error:  # noqa: BLE001 - door: the intake's end must reach every waiter
            self._break(error)
            return
        had = [each.group_id for each in arrivals if self._hand_out(each)]
        if had:
            self._client.done_with(had)

    def _hand_out(self, arrival: Unopened) -> bool:
        """Return whether a coroutine was waiting for it or was cancelled; otherwise `stream` gets
        it.
        """
        call = self._calls.pop(arrival.group_id, None)
        if call is None:
            self._hold(arrival)
            self._wake_streams()
            return False
        self._let_go(arrival)
        if not call.done():
            call.set_result(self._client.open(arrival))
        return True

    def _hold(self, arrival: Unopened) -> None:
        """Queue it for `stream`; until then it is here, or in the journal alone."""
        if isinstance(arrival, RawResult):
            has_room = self._num_held_bytes + arrival.held_bytes <= MAX_HELD_BYTES
            arrival = arrival if has_room else arrival.filed()
        if isinstance(arrival, RawResult):
            self._num_held_bytes += arrival.held_bytes
        self._ended.append(arrival)

    def _let_go(self, arrival: Unopened | Arrival) -> None:
        """Count the group as received, which makes room for another call."""
        self._reopened.pop(arrival.group_id, None)
        if arrival.group_id.run_id == self._client.run_id:
            self._room.release()

    def _break(self, fault: Exception) -> None:
        self._fault = fault
        for call in self._calls.values():
            if call and not call.done():
                call.set_exception(fault)
        self._tell_waiters()

    def _tell_waiters(self) -> None:
        """End all streams and all calls that wait for room."""
        self._wake_streams()
        # The caller that receives this passes it on to the next.
        self._room.release()

    def _wake_streams(self) -> None:
        """Wake every stream."""
        news, self._news = self._news, asyncio.Event()
        news.set()
