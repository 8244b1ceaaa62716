"""RolloutClient: ask the mesh for groups of rollouts and take what comes back, from any program.

    client = RolloutClient(router, config.journal, run_folder)
    client.start()
    group_id = client.ask(task, env="guess", num_samples=8, sampling=SamplingPolicy(), seed=0)
    for arrival in client.take(timeout_s=1.0): ...

Invariants: every group asked for is handed out by `take` once, as Finished or as Dropped with its
reason; what was handed out is in the journal, and a new client on the same folder hands out again
what no noted step took. Every method may be called from any thread and none waits for the network.
Driven by the trainer, evaluations, and users' own code.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path

from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId, new_id
from rollmesh.core.types import SamplingPolicy, Task
from rollmesh.serve.client.arrivals import Arrival, Dropped, Finished, RawResult, open_result
from rollmesh.serve.client.asks import Asked, AsksSettings, Cancelled
from rollmesh.serve.client.book import AnyEntry, Book, Published, StepTaken
from rollmesh.serve.client.intake import Free, Intake, Note
from rollmesh.wire.bodies import encode_ask
from rollmesh.wire.keys import Keys, check_told
from rollmesh.wire.messages import GroupAsk
from rollmesh.wire.sockets import Dialer, Hub

__all__ = ["Arrival", "Dropped", "Finished", "RolloutClient"]

NOTE_TIMEOUT_S = 30.0


class RolloutClient:
    """One client with one sink; its journal stands in `folder/journal`."""

    def __init__(
        self,
        router: str,
        journal: JournalConfig,
        folder: Path,
        keys: Keys | None = None,
        *,
        bind: str = "tcp://127.0.0.1:0",
    ) -> None:
        """Dial `router` and listen at `bind`; AddressError or JournalError where that fails."""
        self.run_id = new_id("r")
        self._lock = threading.Lock()
        self._next_seq = 0
        client_id = new_id("c")
        with ExitStack() as undo:
            check_told(bind)
            book = undo.enter_context(closing(Book(folder, journal)))
            hub = undo.enter_context(closing(Hub(bind, keys)))
            dialer = Dialer(router, client_id, keys)
            undo.pop_all()
        self.address = hub.address
        settings = AsksSettings(client_id=client_id, sink=hub.address)
        self._intake = Intake(hub, dialer, book, settings)

    def start(self) -> None:
        """Begin to serve; what the journal holds of earlier runs is handed out first."""
        self._intake.start(self.run_id)

    def close(self) -> None:
        """Leave: the router cancels what is still open here; the journal stays."""
        self._intake.close()

    def ask(
        self,
        task: Task,
        *,
        env: str,
        num_samples: int,
        sampling: SamplingPolicy,
        seed: int,
        is_eval: bool = False,
        priority: int = 0,
    ) -> GroupId:
        """Ask for `num_samples` rollouts of `task`; the group's id, at once.

        While the journal is over its byte budget asks are held back, and the log says so.
        """
        with self._lock:
            group_id = GroupId(self.run_id, self._next_seq)
            self._next_seq += 1
        ask = GroupAsk(task=task, sampling=sampling, seed=seed, is_eval=is_eval)
        self._intake.command(
            Asked(
                group_id=group_id,
                env=env,
                num_samples=num_samples,
                priority=priority,
                body=encode_ask(ask),
            )
        )
        return group_id

    def cancel(self, group_id: GroupId, reason: str) -> None:
        """End an open group as Dropped with `reason`; nothing happens if it has ended."""
        self._intake.command(Cancelled(group_id, reason))

    def take(self, timeout_s: float) -> list[Arrival]:
        """What has ended since the last call, waiting up to `timeout_s` for the first."""
        return [
            open_result(each) if isinstance(each, RawResult) else each
            for each in self._intake.take(timeout_s)
        ]

    def note_step(self, step: int, group_ids: Sequence[GroupId]) -> None:
        """Write down, before the act, that `step` trains these groups; JournalError if it fails."""
        self._note(StepTaken(step, tuple(group_ids)))

    def note_published(self, policy_version: int, step: int) -> None:
        """Write down, before the act, that the weights after `step` steps are published."""
        self._note(Published(policy_version, step))

    def free(self, position: int) -> None:
        """After a checkpoint: no result before `position` is needed any more."""
        self._intake.command(Free(position))

    def _note(self, entry: AnyEntry) -> None:
        written: Future[None] = Future()
        self._intake.command(Note(entry, written))
        written.result(NOTE_TIMEOUT_S)
