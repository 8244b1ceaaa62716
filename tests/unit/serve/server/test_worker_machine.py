"""A worker's byte budget, and its state machine: a group runs once, and a new router learns of
it."""

import random

from rollmesh.core.ids import GroupId, IntervalSet
from rollmesh.serve.client.arrivals import Keep, ResultKept, ResultSink
from rollmesh.serve.client.asks import Asked
from rollmesh.serve.server.outbox import Forget, OutboxSettings
from rollmesh.serve.server.worker_machine import (
    MAX_REMEMBERED_GROUPS,
    ROOM_SHARE,
    Abort,
    Action,
    Begin,
    Budget,
    BudgetState,
    EnginesSeen,
    GroupRunEnded,
    Left,
    StopAsked,
    Stopping,
    WorkerMachine,
    WorkerMachineSettings,
    WorkerState,
    WornOut,
)
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked
from rollmesh.wire.messages import (
    RELIEVED,
    AnyMessage,
    CancelRun,
    DrainWorker,
    GroupAcked,
    GroupDelivered,
    GroupFinished,
    GroupLost,
    GroupReturned,
    GroupStarted,
    HeldGroup,
    RouterHello,
    RunGroup,
    WorkerHello,
    WorkerLeft,
)

LIMIT = 1000
ROOM = int(ROOM_SHARE * LIMIT)


def states(*held: int, has_groups: bool = True) -> list[BudgetState]:
    budget, seen = Budget(LIMIT), []
    for num_bytes in held:
        budget.weigh(num_bytes, has_groups=has_groups)
        seen.append(budget.state)
    return seen


def test_the_budget_is_full_at_its_limit_and_light_only_well_below_it() -> None:
    light, full = BudgetState.LIGHT, BudgetState.FULL
    assert states(ROOM, LIMIT - 1, LIMIT, LIMIT - 1, ROOM, ROOM - 1, ROOM, LIMIT) == [
        light, light, full, full, full, light, light, full,
    ]  # fmt: skip


def test_the_budget_is_never_full_without_groups() -> None:
    assert states(LIMIT, 10 * LIMIT, has_groups=False) == [BudgetState.LIGHT] * 2


def test_the_exceeded_budget_is_named() -> None:
    budget = Budget(LIMIT)
    assert budget.waits_for == ""
    budget.weigh(LIMIT + 1, has_groups=True)
    assert budget.waits_for == "held_bytes: 1001 held, worker.max_held_bytes = 1000"


ONE, TWO = GroupId("r1", 1), GroupId("r1", 2)
SINK = "tcp://sink"
TICKET = bytes(range(16))


def new_machine(max_unacked_bytes: int = 1000, max_held_bytes: int = 10**6) -> WorkerMachine:
    machine = WorkerMachine(
        WorkerMachineSettings(
            worker_id="w1",
            env="guess",
            max_rollouts=8,
            max_unacked_bytes=max_unacked_bytes,
            max_held_bytes=max_held_bytes,
            outbox=OutboxSettings(resend_s=1.0, delivery_timeout_s=60.0, absent_s=10.0),
        )
    )
    receive(machine, RouterHello(1.0))
    receive(machine, RouterHello(1.0))  # the answer to the hello that followed
    return machine


def receive(machine: WorkerMachine, message: AnyMessage, router: str = "i1") -> list[Action]:
    return machine.step(Received(ROUTER, message, b"ask", router), 0.0)


def run(machine: WorkerMachine, group_id: GroupId, attempt: int = 1) -> list[Action]:
    return receive(machine, RunGroup(group_id, attempt, 4, SINK, ticket=TICKET))


def end(machine: WorkerMachine, group_id: GroupId) -> list[Action]:
    return machine.step(GroupRunEnded(group_id, True, 500), 0.0)


def ack(machine: WorkerMachine, group_id: GroupId) -> list[Action]:
    return machine.step(Received(SINK.encode(), GroupAcked(group_id, 1, False)), 0.0)


def ended_and_acked(machine: WorkerMachine, group_id: GroupId) -> None:
    end(machine, group_id)
    ack(machine, group_id)


def messages_in(actions: list[Action]) -> list[AnyMessage]:
    return [action.message for action in actions if isinstance(action, Send)]


def test_a_worker_sends_hello_until_a_router_answers() -> None:
    machine = WorkerMachine(
        WorkerMachineSettings(worker_id="w1", env="guess", max_rollouts=8, hello_s=1.0)
    )
    ticks = [len(messages_in(machine.step(Ticked(), t / 2))) for t in range(4)]
    assert ticks == [1, 0, 1, 0]
    [hello] = messages_in(receive(machine, RouterHello(1.0)))
    assert isinstance(hello, WorkerHello)
    assert receive(machine, RouterHello(1.0)) == []
    assert messages_in(machine.step(Ticked(), 9.0)) == []


def test_a_router_that_does_not_know_the_worker_is_sent_all_its_groups() -> None:
    machine = new_machine()
    run(machine, ONE)
    [hello] = messages_in(receive(machine, RouterHello(1.0)))
    assert isinstance(hello, WorkerHello)
    assert hello.holds == (HeldGroup(ONE, 1, False),)
    assert receive(machine, RouterHello(1.0)) == []


def test_a_group_is_started_with_its_body_and_reported() -> None:
    machine = new_machine()
    assert run(machine, ONE) == [Send(ROUTER, GroupStarted(ONE, 1)), Begin(ONE, 4, b"ask")]
    assert machine.num_rollouts == 4


def test_a_repeated_request_does_not_run_twice() -> None:
    machine = new_machine()
    run(machine, ONE)
    assert run(machine, ONE) == [Send(ROUTER, GroupStarted(ONE, 1))]
    end(machine, ONE)
    assert run(machine, ONE) == [Send(ROUTER, GroupStarted(ONE, 1))]


def test_a_later_attempt_of_a_running_group_takes_over_its_work() -> None:
    machine = new_machine()
    run(machine, ONE)
    assert run(machine, ONE, attempt=2) == [Send(ROUTER, GroupStarted(ONE, 2))]
    [send] = end(machine, ONE)
    assert send == Send(SINK.encode(), GroupFinished(ONE, 2, "w1", True, TICKET))


def test_a_result_goes_to_its_clients_newest_address() -> None:
    machine = new_machine()
    for group_id in (ONE, TWO):
        run(machine, group_id)
    end(machine, TWO)
    for group_id in (ONE, TWO):
        receive(machine, RunGroup(group_id, 1, 4, "tcp://elsewhere"))
    elsewhere = b"tcp://elsewhere"
    assert end(machine, ONE) == [Send(elsewhere, GroupFinished(ONE, 1, "w1", True))]
    assert Send(elsewhere, GroupFinished(TWO, 1, "w1", True)) in machine.step(Ticked(), 0.0)


def test_a_late_request_for_a_delivered_group_is_answered_and_not_run() -> None:
    machine = new_machine()
    run(machine, ONE)
    end(machine, ONE)
    assert ack(machine, ONE) == [Send(ROUTER, GroupDelivered(ONE, 1, TICKET)), Forget(ONE)]
    assert run(machine, ONE, attempt=2) == [Send(ROUTER, GroupDelivered(ONE, 2, TICKET))]


def test_the_number_of_remembered_groups_is_bounded() -> None:
    machine = new_machine()
    for seq in range(0, 2 * MAX_REMEMBERED_GROUPS + 2, 2):  # the others go to another worker
        run(machine, GroupId("r1", seq))
        end(machine, GroupId("r1", seq))
        ack(machine, GroupId("r1", seq))
    assert Begin(GroupId("r1", 0), 4, b"ask") in run(machine, GroupId("r1", 0), attempt=2)
    kept = GroupId("r1", 2)
    assert run(machine, kept, attempt=2) == [Send(ROUTER, GroupDelivered(kept, 2, TICKET))]


def test_a_new_router_is_sent_all_groups_before_anything_else() -> None:
    machine = new_machine()
    run(machine, ONE)
    run(machine, TWO)
    end(machine, TWO)
    hello, started = messages_in(
        machine.step(Received(ROUTER, RunGroup(GroupId("r1", 3), 1, 1, SINK), b"", "i2"), 0.0)
    )
    assert isinstance(hello, WorkerHello)
    assert hello.holds == (HeldGroup(ONE, 1, False), HeldGroup(TWO, 1, True))
    assert isinstance(started, GroupStarted)


def test_a_cancelled_run_is_aborted_and_forgotten_when_it_has_ended() -> None:
    machine = new_machine()
    run(machine, ONE)
    assert receive(machine, CancelRun(ONE, "stale")) == [Abort(ONE, "stale")]
    [returned] = messages_in(run(machine, ONE, attempt=2))
    assert isinstance(returned, GroupReturned)
    assert end(machine, ONE) == [Forget(ONE)]
    assert Begin(ONE, 4, b"ask") in run(machine, ONE, attempt=3)


def test_a_cancelled_result_is_forgotten() -> None:
    machine = new_machine()
    run(machine, ONE)
    end(machine, ONE)
    assert receive(machine, CancelRun(ONE, "stale")) == [Forget(ONE)]
    assert not machine.holds()


def test_a_worker_over_its_byte_budget_does_not_accept_groups() -> None:
    machine = new_machine(max_unacked_bytes=500)
    accepting = [machine.accepting]
    run(machine, ONE)
    for act in (end, ack):
        act(machine, ONE)
        accepting.append(machine.accepting)
    assert accepting == [True, False, True]


def test_a_worker_reports_which_budget_it_waits_for() -> None:
    machine = new_machine(max_unacked_bytes=500, max_held_bytes=1000)
    run(machine, ONE)
    states = []
    for act in (
        lambda: machine.weigh(999),
        lambda: machine.weigh(1000),
        lambda: machine.weigh(10),
        lambda: end(machine, ONE),
        lambda: ack(machine, ONE),
    ):
        act()
        states.append((machine.accepting, machine.waits_for))
    assert states == [
        (True, ""),
        (False, "held_bytes: 1000 held, worker.max_held_bytes = 1000"),
        (True, ""),
        (False, "unacked_bytes: 500 unacked, worker.max_unacked_bytes = 500"),
        (True, ""),
    ]


def test_a_worker_without_groups_accepts_some_whatever_its_byte_count() -> None:
    machine = new_machine(max_held_bytes=1000)
    accepting = []
    for act in (machine.holds, lambda: run(machine, ONE), lambda: ended_and_acked(machine, ONE)):
        act()
        machine.weigh(5000)
        accepting.append(machine.accepting)
    assert accepting == [True, False, True], "without groups it could never become lighter"


def test_a_full_worker_runs_groups_that_were_already_sent() -> None:
    machine = new_machine(max_held_bytes=1000)
    run(machine, ONE)
    machine.weigh(1000)
    assert Begin(TWO, 4, b"ask") in run(machine, TWO)


def test_a_draining_worker_finishes_and_leaves() -> None:
    machine = new_machine()
    run(machine, ONE)
    assert receive(machine, DrainWorker("shrink")) == []
    assert not machine.accepting
    [returned] = messages_in(run(machine, TWO))
    assert isinstance(returned, GroupReturned)
    end(machine, ONE)
    actions = ack(machine, ONE)
    assert actions[-2:] == [Send(ROUTER, WorkerLeft("w1", "drained: shrink")), Left()]
    assert machine.state is WorkerState.LEFT


def test_draining_worker_whose_sink_is_away_gives_back_what_it_cannot_deliver() -> None:
    machine = new_machine()
    run(machine, ONE)
    run(machine, TWO)
    end(machine, ONE)
    receive(machine, DrainWorker("shrink"))
    assert Left(1) not in machine.step(Ticked(), 59.0), "another group still runs"
    machine = new_machine()
    run(machine, ONE)
    end(machine, ONE)
    receive(machine, DrainWorker("shrink"))
    assert machine.state is WorkerState.DRAINING
    machine.step(Ticked(), 9.9)
    assert machine.state is WorkerState.DRAINING, "the sink may be slow"
    left = Send(ROUTER, WorkerLeft("w1", "drained: shrink"))
    assert machine.step(Ticked(), 10.0)[-3:] == [Forget(ONE), left, Left(1)]
    assert (machine.state, machine.holds()) == (WorkerState.LEFT, [])


def end_one_when_worn(machine: WorkerMachine) -> None:
    run(machine, ONE)
    end(machine, ONE)
    machine.step(WornOut("9 rollouts"), 0.0)


def test_a_worn_worker_waits_for_its_sink() -> None:
    machine = new_machine()
    end_one_when_worn(machine)
    receive(machine, DrainWorker(RELIEVED))
    machine.step(Ticked(), 59.0)
    assert machine.state is WorkerState.DRAINING
    machine.step(StopAsked("SIGTERM"), 59.0)
    assert (machine.state, str(machine.leaving)) == (WorkerState.LEFT, "stopped: SIGTERM")


def test_a_worn_worker_that_is_drained_does_not_wait_for_an_absent_sink() -> None:
    machine = new_machine()
    end_one_when_worn(machine)
    receive(machine, DrainWorker("shrink"))
    machine.step(Ticked(), 59.0)
    assert (machine.state, str(machine.leaving)) == (WorkerState.LEFT, "drained: shrink")


def test_a_worn_worker_finishes_its_groups_and_leaves_with_the_reason() -> None:
    machine = new_machine()
    run(machine, ONE)
    assert machine.step(WornOut("9 rollouts"), 0.0) == []
    assert receive(machine, DrainWorker(RELIEVED)) == []
    [returned] = messages_in(run(machine, TWO))
    assert isinstance(returned, GroupReturned)
    end(machine, ONE)
    assert ack(machine, ONE)[-2:] == [
        Send(ROUTER, WorkerLeft("w1", "recycled: 9 rollouts")),
        Left(),
    ]


def test_a_worn_worker_accepts_groups_until_it_may_leave_or_is_stopped() -> None:
    machine = new_machine()
    machine.step(WornOut("9 rollouts"), 0.0)
    assert (machine.state, machine.accepting) == (WorkerState.WORN, True)
    assert Begin(ONE, 4, b"ask") in run(machine, ONE)
    machine.step(StopAsked("SIGTERM"), 0.0)
    assert str(machine.leaving) == "stopped: SIGTERM", "the worker is not replaced"


def test_a_worker_far_past_its_memory_limit_leaves_without_permission() -> None:
    machine = new_machine()
    machine.step(WornOut("900 MB"), 0.0)
    actions = machine.step(WornOut("990 MB", is_urgent=True), 0.0)
    assert actions == [Send(ROUTER, WorkerLeft("w1", "recycled: 990 MB")), Left()]


def test_a_result_that_is_never_acked_is_given_up_and_reported() -> None:
    machine = new_machine()
    run(machine, ONE)
    end(machine, ONE)
    actions = machine.step(Ticked(), 60.0)
    lost = GroupLost(ONE, 1, "tcp://sink did not ack in 60 s")
    assert actions == [Send(ROUTER, lost), Forget(ONE)]
    assert (machine.holds(), machine.outbox.unacked_bytes) == ([], 0)
    assert Begin(ONE, 4, b"ask") in run(machine, ONE, attempt=2)


def test_the_deadline_of_a_request_is_passed_to_its_run() -> None:
    [_, begin] = receive(new_machine(), RunGroup(ONE, 1, 4, SINK, deadline_s=7.5))
    assert begin == Begin(ONE, 4, b"ask", 7.5)


def test_a_stopping_worker_aborts_running_groups_and_delivers_finished_ones() -> None:
    machine = new_machine()
    run(machine, ONE)
    run(machine, TWO)
    end(machine, TWO)
    assert machine.step(Stopping("SIGTERM"), 0.0) == [Abort(ONE, "SIGTERM")]
    assert end(machine, ONE) == [Forget(ONE)]
    assert Left() in ack(machine, TWO)


def test_a_worker_that_is_asked_to_stop_finishes_its_groups_and_accepts_none() -> None:
    machine = new_machine()
    run(machine, ONE)
    assert machine.step(StopAsked("SIGTERM"), 0.0) == []
    [returned] = run(machine, TWO)
    assert isinstance(returned, Send)
    assert isinstance(returned.message, GroupReturned)
    end(machine, ONE)
    assert Left() in ack(machine, ONE)
    assert str(machine.leaving) == "stopped: SIGTERM"


def test_an_idle_worker_that_is_stopped_leaves_at_once() -> None:
    assert Left() in new_machine().step(Stopping("SIGTERM"), 0.0)


def test_every_group_is_kept_once_though_messages_are_lost_and_repeated() -> None:
    for seed in range(50):
        rng = random.Random(seed)
        machine, sink = new_machine(), ResultSink({"r1": IntervalSet()}, asked)
        kept: list[GroupId] = []
        mail: list[Action] = []
        for seq in range(20):
            mail += run(machine, GroupId("r1", seq)) + end(machine, GroupId("r1", seq))
        for tick in range(1, 2000):
            rng.shuffle(mail)
            answers = [_carry(action, machine, sink, kept) for action in mail if rng.random() < 0.6]
            mail = [answer for some in answers for answer in some]
            mail += machine.step(Ticked(), float(tick))
            if not machine.holds():
                break
        assert sorted(kept) == [GroupId("r1", seq) for seq in range(20)]
        assert machine.outbox.unacked_bytes == 0


def asked(group_id: GroupId) -> Asked:
    """The client's request that led to `run`."""
    return Asked(group_id=group_id, env="guess", num_samples=4, ticket=TICKET)


def _carry(
    action: Action, machine: WorkerMachine, sink: ResultSink, kept: list[GroupId]
) -> list[Action]:
    """Return the worker's next actions after `action` reached the other side and its answer
    arrived."""
    if not isinstance(action, Send) or action.route != SINK.encode():
        return []
    answers: list[Action] = []
    for reaction in sink.step(Received(b"w1", action.message), 0.0):
        replies = [reaction]
        if isinstance(reaction, Keep):
            kept.append(reaction.message.group_id)
            replies = sink.step(ResultKept(reaction), 0.0)
        for reply in replies:
            assert isinstance(reply, Send)
            answers += machine.step(Received(action.route, reply.message), 0.0)
    return answers


STRANDED_GROUP = GroupId("r1", 1)
STRANDED_S = 60.0
STRANDED = "it drains, and no engine serves"


class WaitsForever(WorkerMachine):
    """The fault: a draining worker waits forever."""

    def _see_engines(self, any_serves: bool, now_s: float) -> list[Action]:
        del any_serves, now_s
        return []


def running_machine(
    kind: type[WorkerMachine] = WorkerMachine, *, drains: bool = True
) -> WorkerMachine:
    """Return a machine that runs one group and, with `drains`, is draining."""
    settings = WorkerMachineSettings(
        worker_id="w1", env="guess", max_rollouts=8, stranded_s=STRANDED_S
    )
    machine = kind(settings)
    for message in (
        RouterHello(1.0),
        RouterHello(1.0),
        RunGroup(STRANDED_GROUP, 1, 4, "tcp://sink"),
    ):
        machine.step(Received(ROUTER, message, b"ask", "i1"), 0.0)
    if drains:
        machine.step(Received(ROUTER, DrainWorker("shrink"), b"", "i1"), 0.0)
    return machine


def see(machine: WorkerMachine, now_s: float, *, any_serves: bool = False) -> list[Action]:
    return machine.step(EnginesSeen(any_serves), now_s)


def test_a_draining_worker_returns_its_groups_when_no_engine_has_served_for_long() -> None:
    machine = running_machine()
    assert see(machine, 100.0) == []
    assert see(machine, 100.0 + STRANDED_S - 0.1) == []
    assert see(machine, 100.0 + STRANDED_S) == [Abort(STRANDED_GROUP, STRANDED)]
    assert see(machine, 101.0 + STRANDED_S) == [], "the run is aborted once"
    gone = machine.step(GroupRunEnded(STRANDED_GROUP, False, 0), 102.0 + STRANDED_S)
    assert gone == [
        Forget(STRANDED_GROUP),
        Send(ROUTER, WorkerLeft("w1", "drained: shrink")),
        Left(),
    ]


def test_a_draining_worker_that_waited_forever_would_never_leave() -> None:
    machine = running_machine(WaitsForever)
    see(machine, 0.0)
    assert see(machine, 1e6) == []
    assert machine.state is WorkerState.DRAINING


def test_a_draining_worker_finishes_its_groups_when_engines_return_in_time() -> None:
    machine = running_machine()
    see(machine, 0.0)
    see(machine, STRANDED_S - 1.0, any_serves=True)
    assert see(machine, STRANDED_S) == see(machine, 2 * STRANDED_S - 1.0) == []
    assert machine.running


def test_a_worker_that_does_not_drain_waits_for_engines_without_limit() -> None:
    machine = running_machine(drains=False)
    see(machine, 0.0)
    assert see(machine, 1e6) == []
    machine.step(Received(ROUTER, DrainWorker("shrink"), b"", "i1"), 1e6)
    assert see(machine, 1e6) == [], "the time starts with the drain"
    assert see(machine, 1e6 + STRANDED_S) == [Abort(STRANDED_GROUP, STRANDED)]
