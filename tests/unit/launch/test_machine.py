"""The supervision machine: the order of starts, restarts, and the end of a run."""

import random
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.config import LaunchConfig
from rollmesh.core.process import INTERRUPTED, RECYCLED
from rollmesh.launch.machine import (
    OUT_OF_MEMORY,
    STOP_RESERVE_S,
    Action,
    ChildExited,
    ChildPending,
    ChildPlaced,
    ChildReady,
    ChildState,
    Event,
    HeartbeatReceived,
    KillChild,
    MeshState,
    Notice,
    NotifyRouter,
    ReleaseGate,
    RunAborted,
    RunEnd,
    StartChild,
    StopRequested,
    SupervisionMachine,
    TerminateChild,
    TimePassed,
)
from rollmesh.launch.plan import ChildPlan, OnDeath
from rollmesh.testing.clock import FakeClock

SETTINGS = LaunchConfig(ready_timeout_s=30.0, stop_timeout_s=4.0, max_restarts=2)


def plan(role: str, on_death: OnDeath, *needs: str, gate: tuple[str, ...] = ()) -> ChildPlan:
    return ChildPlan(role=role, argv=(role,), on_death=on_death, needs=needs, gate=gate)


def worker_plan(role: str) -> ChildPlan:
    return ChildPlan(role=role, argv=(role,), on_death=OnDeath.REPLACE, is_worker=True)


PLANS = [
    plan("engine", OnDeath.END),
    plan("router", OnDeath.END),
    plan("worker", OnDeath.RESTART, "router"),
    plan("trainer", OnDeath.FINISH, "router"),
    plan("page", OnDeath.CONTINUE),
]


class MachineDriver:
    """A supervision machine and its clock."""

    def __init__(self, plans: list[ChildPlan] = PLANS, settings: LaunchConfig = SETTINGS) -> None:
        self.machine = SupervisionMachine(plans, settings, logs=Path("logs"))
        self.clock = FakeClock()

    def step(self, event: Event, after_s: float = 0.0) -> list[Action]:
        self.clock.advance(after_s)
        return self.machine.step(event, self.clock.now_s())

    def run_all(self) -> None:
        self.step(TimePassed())
        for role in self.machine.children:
            self.step(ChildReady(role))

    def mesh(self) -> MeshState:
        return self.machine.state

    def state(self, role: str) -> ChildState:
        return self.machine.children[role].state


@pytest.fixture
def driver() -> MachineDriver:
    return MachineDriver()


@pytest.fixture
def running(driver: MachineDriver) -> MachineDriver:
    driver.run_all()
    assert driver.mesh() is MeshState.RUNNING
    return driver


def test_a_child_starts_only_when_all_its_needs_are_ready(driver: MachineDriver) -> None:
    assert driver.step(TimePassed()) == [
        StartChild("engine"),
        StartChild("router"),
        StartChild("page"),
    ]
    assert driver.step(ChildReady("engine")) == []
    assert driver.step(ChildReady("router")) == [StartChild("worker"), StartChild("trainer")]


def test_the_mesh_runs_when_every_child_has_reported(driver: MachineDriver) -> None:
    driver.step(TimePassed())
    for role in ("engine", "router", "page", "worker"):
        driver.step(ChildReady(role))
        assert driver.mesh() is MeshState.STARTING
    driver.step(ChildReady("trainer"))
    assert driver.mesh() is MeshState.RUNNING


def test_a_task_lets_the_others_start_when_it_is_done() -> None:
    driver = MachineDriver([plan("model", OnDeath.NEXT), plan("engine", OnDeath.END, "model")])
    assert driver.step(TimePassed()) == [StartChild("model")]
    assert driver.step(ChildExited("model", 0)) == [StartChild("engine")]
    assert driver.state("model") is ChildState.DONE


def test_a_gated_child_is_started_early_and_held_until_its_gate_opens() -> None:
    held = plan("engine", OnDeath.END, gate=("model",))
    driver = MachineDriver([plan("model", OnDeath.NEXT), held])
    assert driver.step(TimePassed()) == [StartChild("model"), StartChild("engine")]
    assert driver.state("engine") is ChildState.HELD
    assert driver.step(TimePassed(), after_s=1000.0) == []
    assert driver.step(ChildExited("model", 0)) == [ReleaseGate("engine")]
    assert driver.step(TimePassed(), after_s=29.0) == []
    driver.step(TimePassed(), after_s=1.0)
    assert driver.machine.end == RunEnd(1, "engine was not ready within 30 s")


def test_a_gated_child_that_starts_again_passes_at_once() -> None:
    gated = plan("worker", OnDeath.RESTART, gate=("model",))
    driver = MachineDriver([plan("model", OnDeath.NEXT), gated])
    driver.step(TimePassed())
    driver.step(ChildExited("model", 0))
    driver.step(ChildExited("worker", -9))
    assert driver.step(TimePassed(), after_s=1.0) == [StartChild("worker"), ReleaseGate("worker")]


def test_a_held_child_stops_and_dies_like_any_other() -> None:
    held = plan("engine", OnDeath.END, gate=("model",))
    driver = MachineDriver([plan("model", OnDeath.NEXT), held])
    driver.step(TimePassed())
    assert driver.step(StopRequested()) == [TerminateChild("model"), TerminateChild("engine")]
    again = MachineDriver([plan("model", OnDeath.NEXT), held])
    again.step(TimePassed())
    again.step(ChildExited("engine", 1))
    assert again.machine.end == RunEnd(1, "engine exited with code 1")


def test_a_task_has_no_time_limit_but_must_not_fail() -> None:
    driver = MachineDriver([plan("model", OnDeath.NEXT), plan("engine", OnDeath.END, "model")])
    driver.step(TimePassed())
    assert driver.step(TimePassed(), after_s=1000.0) == []
    driver.step(ChildExited("model", 1, "ValueError: no"))
    assert driver.machine.end == RunEnd(1, "model exited with code 1: ValueError: no")


def test_a_child_that_does_not_report_in_time_ends_the_start(driver: MachineDriver) -> None:
    driver.step(TimePassed())
    driver.step(TimePassed(), after_s=29.0)
    assert driver.machine.end is None
    driver.step(TimePassed(), after_s=1.0)
    assert driver.machine.end == RunEnd(1, "engine was not ready within 30 s")


def test_a_user_error_ends_the_run_with_its_own_line(driver: MachineDriver) -> None:
    driver.step(TimePassed())
    driver.step(ChildExited("engine", 2, "rollmesh: model.path = x: no such folder"))
    assert driver.machine.end == RunEnd(2, "model.path = x: no such folder")


def test_a_user_error_of_a_restarted_worker_counts_as_any_death(
    running: MachineDriver,
) -> None:
    # It has served with these settings, so its environment failed, and other workers still serve.
    error_line = "rollmesh: env = x: module x cannot be imported: OSError: stale file handle"
    running.step(ChildExited("worker", -9))
    running.step(TimePassed(), after_s=1.0)
    [note] = running.step(ChildExited("worker", 2, error_line))
    assert isinstance(note, Notice)
    assert note.line.endswith("stale file handle; restart in 1 s")
    running.step(TimePassed(), after_s=1.0)
    running.step(ChildExited("worker", 2, error_line))
    reason = f"worker exited with code 2: {error_line}, death 3 within 60 s; see logs/worker.out"
    assert running.machine.end == RunEnd(1, reason)


def test_a_late_user_error_of_a_trainer_is_still_a_user_error(
    running: MachineDriver,
) -> None:
    running.step(ChildExited("trainer", 2, "rollmesh: journal.max_bytes = 1: too little"))
    assert running.machine.end == RunEnd(2, "journal.max_bytes = 1: too little")


def test_a_restarted_worker_that_does_not_report_is_killed_alone(running: MachineDriver) -> None:
    running.step(ChildExited("worker", -9))
    for _ in range(SETTINGS.max_restarts):
        assert running.machine.end is None
        assert running.step(TimePassed(), after_s=1.0) == [StartChild("worker")]
        assert running.step(TimePassed(), after_s=29.0) == []
        assert running.step(TimePassed(), after_s=1.0) == [KillChild("worker")]
        running.step(ChildExited("worker", -9, "loading"))
    how = "worker was killed: not ready within 30 s: loading"
    why = "death 3 before it was ready again; see logs/worker.out"
    assert running.machine.end == RunEnd(1, f"{how}, {why}")


@pytest.mark.parametrize("role", ["engine", "router"])
def test_the_death_of_an_irreplaceable_process_ends_the_run(
    running: MachineDriver, role: str
) -> None:
    running.step(ChildExited(role, -9))
    assert running.machine.end == RunEnd(1, f"{role} was killed by signal 9")


@pytest.mark.parametrize("code", [1, -9])
def test_a_dead_trainer_is_restarted_while_all_others_run(
    running: MachineDriver, code: int
) -> None:
    running.step(ChildExited("trainer", code))
    assert running.step(TimePassed(), after_s=0.6) == [StartChild("trainer")]
    assert running.machine.end is None


def test_a_finished_trainer_ends_the_run_successfully(running: MachineDriver) -> None:
    actions = running.step(ChildExited("trainer", 0))
    assert running.machine.end == RunEnd(0, "done")
    assert actions == [
        TerminateChild("engine"),
        TerminateChild("router"),
        TerminateChild("worker"),
        TerminateChild("page"),
    ]


def test_a_worker_that_dies_starts_again_after_a_pause_that_grows(running: MachineDriver) -> None:
    [note] = running.step(ChildExited("worker", -9))
    assert isinstance(note, Notice)
    assert "worker was killed by signal 9" in note.line
    assert running.step(TimePassed(), after_s=0.4) == []
    assert running.step(TimePassed(), after_s=0.2) == [StartChild("worker")]
    running.step(ChildExited("worker", 1))
    assert running.step(TimePassed(), after_s=0.9) == []
    assert running.step(TimePassed(), after_s=0.2) == [StartChild("worker")]
    assert running.machine.end is None


@pytest.mark.parametrize("role", ["worker", "trainer"])
def test_a_crash_loop_ends_the_run_with_the_reason(running: MachineDriver, role: str) -> None:
    for _ in range(SETTINGS.max_restarts):
        running.step(ChildExited(role, 1, "boom"))
        running.step(TimePassed(), after_s=5.0)
    running.step(ChildExited(role, 1, "boom"))
    reason = f"{role} exited with code 1: boom, death 3 within 60 s; see logs/{role}.out"
    assert running.machine.end == RunEnd(1, reason)


@pytest.fixture
def workers() -> MachineDriver:
    """Two replaceable workers."""
    driver = MachineDriver([worker_plan("w0"), worker_plan("w1")])
    driver.run_all()
    return driver


def wait(driver: MachineDriver, seconds: int, *beating: str) -> list[Action]:
    """Advance by `seconds`, one at a time, with heartbeats of the children `beating` only."""
    actions = []
    for _ in range(seconds):
        actions += driver.step(TimePassed(), after_s=1.0)
        for role in beating:
            actions += driver.step(HeartbeatReceived(role))
    return actions


@pytest.mark.parametrize("role", ["worker", "trainer", "page"])
def test_a_process_whose_heartbeats_stop_is_reported_killed_and_restarted(
    running: MachineDriver, role: str
) -> None:
    others = [each for each in running.machine.children if each != role]
    running.step(HeartbeatReceived(role))
    [note] = wait(running, 89, *others)
    assert isinstance(note, Notice)
    assert note.line.startswith(f"{role} has not responded for 30 s")
    assert wait(running, 5, *others) == [KillChild(role)], "one kill only"
    exited = running.step(ChildExited(role, -9))
    assert exited[-1] == Notice(f"{role} was killed: no heartbeat for 90 s; restart in 0.5 s")
    assert wait(running, 1, *others) == [StartChild(role)]
    running.step(ChildReady(role))
    assert wait(running, 300, *others) == [], "its successor has not sent one yet"


def test_a_process_whose_heartbeats_resume_in_time_is_not_killed(running: MachineDriver) -> None:
    running.step(HeartbeatReceived("worker"))
    wait(running, 80)
    assert running.step(HeartbeatReceived("worker")) == [Notice("worker responds again after 80 s")]
    assert wait(running, 29) == []


def test_a_process_without_heartbeats_is_not_killed_for_silence(running: MachineDriver) -> None:
    assert wait(running, 1000) == []


def test_a_suspended_machine_kills_nothing(running: MachineDriver) -> None:
    running.step(HeartbeatReceived("worker"))
    wait(running, 10)
    assert running.step(TimePassed(), after_s=3600.0) == [], "launch did not run either"
    assert wait(running, 19) == []


def test_heartbeats_are_not_watched_where_that_is_switched_off() -> None:
    driver = MachineDriver(settings=msgspec.structs.replace(SETTINGS, hang_timeout_s=0.0))
    driver.run_all()
    driver.step(HeartbeatReceived("worker"))
    assert wait(driver, 1000) == []


def test_a_workers_exit_and_its_cause_are_reported_to_the_router(workers: MachineDriver) -> None:
    death = ChildExited("w0", -9, "", 41, "killed by signal 9")
    assert workers.step(death)[0] == NotifyRouter("w0", 41, "killed by signal 9")


def test_other_exits_and_those_at_a_runs_end_are_not_reported_to_the_router(
    running: MachineDriver, workers: MachineDriver
) -> None:
    actions = running.step(ChildExited("trainer", 1, "", 41, "exit code 1"))
    workers.step(StopRequested())
    actions += workers.step(ChildExited("w0", 0, "", 41, "exit code 0"))
    assert not any(isinstance(each, NotifyRouter) for each in actions)


def test_lack_of_memory_is_shown_to_the_user(workers: MachineDriver) -> None:
    notes = workers.step(ChildExited("w0", -9, "", 41, OUT_OF_MEMORY))
    assert notes[-1] == Notice("w0 ran out of memory; restart in 0.5 s")


def test_a_drained_worker_is_not_restarted_and_the_run_continues(workers: MachineDriver) -> None:
    actions = workers.step(ChildExited("w0", 0, "", 41, "exit code 0"))
    assert actions[-1] == Notice("w0 was drained and is not restarted")
    assert workers.step(TimePassed(), after_s=100.0) == []
    assert (workers.state("w0"), workers.mesh()) == (ChildState.GONE, MeshState.RUNNING)


def test_a_crash_while_an_environment_loads_names_it() -> None:
    worker = msgspec.structs.replace(worker_plan("w0"), loads="env = my_env:MyEnv")
    driver = MachineDriver([worker])
    driver.step(TimePassed())
    notes = driver.step(ChildExited("w0", -11, "", 41, "killed by signal 11"))
    how = "w0 was killed by signal 11 while loading env = my_env:MyEnv"
    assert notes[-1] == Notice(f"{how}; restart in 0.5 s")
    driver.step(TimePassed(), after_s=1.0)
    driver.step(ChildReady("w0"))
    notes = driver.step(ChildExited("w0", -11, "", 42, "killed by signal 11"))
    assert notes[-1] == Notice("w0 was killed by signal 11; restart in 1 s")


def test_a_run_reports_that_its_last_worker_was_drained(workers: MachineDriver) -> None:
    workers.step(ChildExited("w0", 0, "", 41, "exit code 0"))
    [*_, note] = workers.step(ChildExited("w1", 0, "", 42, "exit code 0"))
    assert isinstance(note, Notice)
    assert "this run has no worker left" in note.line


@pytest.mark.parametrize("role", ["trainer", "worker", "page"])
def test_a_process_interrupted_by_a_foreign_signal_is_restarted(
    running: MachineDriver, role: str
) -> None:
    [note] = running.step(ChildExited(role, INTERRUPTED, "a warning of some library"))
    stopped = f"{role} was stopped by a signal that launch did not send"
    assert note == Notice(f"{stopped}; restart in 0.5 s")
    assert running.step(TimePassed(), after_s=0.6) == [StartChild(role)]
    assert running.machine.end is None


def test_a_worker_interrupted_by_a_foreign_signal_is_replaced(
    workers: MachineDriver,
) -> None:
    workers.step(ChildExited("w0", INTERRUPTED, "", 41, "exit code 130"))
    assert workers.step(TimePassed(), after_s=0.6) == [StartChild("w0")]


def test_a_worker_that_recycled_itself_is_replaced_at_once(workers: MachineDriver) -> None:
    for _ in range(2 * SETTINGS.max_restarts):
        workers.step(TimePassed(), after_s=SETTINGS.min_recycle_s)
        actions = workers.step(ChildExited("w0", RECYCLED, "600 MB", 41, "exit code 75"))
        assert actions[1:] == [Notice("w0 recycled itself: 600 MB"), StartChild("w0")]
        workers.step(ChildReady("w0"))
    assert workers.machine.end is None


def test_a_worker_that_does_nothing_but_recycle_itself_ends_the_run(workers: MachineDriver) -> None:
    for _ in range(SETTINGS.max_restarts + 1):
        workers.step(ChildExited("w0", RECYCLED, "600 MB", 41, "exit code 75"))
        workers.step(TimePassed(), after_s=5.0)
    assert workers.machine.end
    assert workers.machine.end.reason.endswith("600 MB, death 3 within 60 s; see logs/w0.out")


def test_deaths_far_apart_are_no_crash_loop(workers: MachineDriver) -> None:
    for _ in range(10):
        workers.step(ChildExited("w0", 1), after_s=SETTINGS.restart_window_s)
        workers.step(TimePassed(), after_s=1.0)
        workers.step(ChildReady("w0"))
        workers.step(ChildExited("w0", RECYCLED), after_s=SETTINGS.restart_window_s)
        for _ in range(SETTINGS.max_restarts):
            workers.step(ChildExited("w0", 1))
            assert workers.step(TimePassed(), after_s=1.0) == [StartChild("w0")]
        workers.step(ChildReady("w0"))
    assert workers.machine.end is None


def test_a_child_that_dies_in_every_load_ends_the_run_however_long_a_load_is() -> None:
    driver = MachineDriver([plan("engine", OnDeath.RESTART)])
    driver.run_all()
    driver.step(ChildExited("engine", -9))
    line = "rollmesh: engine: SGLang ended while loading weights: exit code 1: OSError: boom"
    for _ in range(SETTINGS.max_restarts):
        assert driver.step(TimePassed(), after_s=10.0) == [StartChild("engine")]
        driver.step(ChildExited("engine", 2, line), after_s=SETTINGS.restart_window_s)
    why = "death 3 before it was ready again; see logs/engine.out"
    assert driver.machine.end == RunEnd(1, f"engine exited with code 2: {line}, {why}")


def test_a_run_continues_without_a_page_that_keeps_dying(running: MachineDriver) -> None:
    for _ in range(SETTINGS.max_restarts + 1):
        running.step(ChildExited("page", 1))
        running.step(TimePassed(), after_s=5.0)
    assert running.machine.end is None
    assert running.state("page") is ChildState.GONE
    assert running.mesh() is MeshState.RUNNING


def test_a_stop_lets_the_trainer_save_before_the_others_go(running: MachineDriver) -> None:
    assert running.step(StopRequested()) == [TerminateChild("trainer")]
    assert running.mesh() is MeshState.SAVING
    others = [
        TerminateChild("engine"),
        TerminateChild("router"),
        TerminateChild("worker"),
        TerminateChild("page"),
    ]
    assert running.step(ChildExited("trainer", 0)) == others
    assert running.mesh() is MeshState.STOPPING
    for role in ("engine", "router", "worker", "page"):
        running.step(ChildExited(role, 0))
    assert running.mesh() is MeshState.ENDED
    assert running.machine.end == RunEnd(130, "stopped")


def test_a_slow_trainer_does_not_use_up_the_others_time(running: MachineDriver) -> None:
    running.step(StopRequested())
    assert running.step(TimePassed(), after_s=4.0 - STOP_RESERVE_S - 0.1) == []
    assert len(running.step(TimePassed(), after_s=0.2)) == 4


def test_children_that_still_run_after_the_stop_timeout_are_killed(running: MachineDriver) -> None:
    running.step(StopRequested())
    running.step(ChildExited("trainer", 0))
    running.step(ChildExited("engine", 0))
    killed = running.step(TimePassed(), after_s=4.0)
    assert killed == [KillChild("router"), KillChild("worker"), KillChild("page")]


def test_a_run_that_cannot_continue_is_killed_at_once(running: MachineDriver) -> None:
    killed = running.step(RunAborted("its folder was moved"))
    assert killed == [KillChild(role) for role in running.machine.children]
    assert running.machine.end == RunEnd(1, "its folder was moved")
    for role in running.machine.children:
        running.step(ChildExited(role, -9))
    assert running.mesh() is MeshState.ENDED


def test_a_second_stop_kills_at_once(running: MachineDriver) -> None:
    running.step(StopRequested())
    killed = running.step(StopRequested())
    assert killed == [KillChild(role) for role in running.machine.children]


def test_a_stop_while_starting_starts_nothing_more(driver: MachineDriver) -> None:
    driver.step(TimePassed())
    assert driver.step(StopRequested()) == [
        TerminateChild("engine"),
        TerminateChild("router"),
        TerminateChild("page"),
    ]
    assert driver.step(ChildReady("router")) == []
    assert driver.state("worker") is ChildState.GONE


def test_a_stop_before_anything_started_ends_the_run() -> None:
    driver = MachineDriver()
    driver.step(StopRequested())
    assert driver.mesh() is MeshState.ENDED


def test_a_worker_that_dies_while_stopping_stays_dead(running: MachineDriver) -> None:
    running.step(StopRequested())
    running.step(ChildExited("worker", 1))
    actions = running.step(TimePassed(), after_s=2.0)
    assert StartChild("worker") not in actions
    assert running.machine.end == RunEnd(130, "stopped")


def test_events_of_an_unknown_child_change_nothing(running: MachineDriver) -> None:
    assert running.step(ChildExited("stranger", 1)) == []
    assert running.step(ChildReady("stranger")) == []
    assert running.mesh() is MeshState.RUNNING


@pytest.mark.parametrize("seed", range(50))
def test_every_sequence_of_events_ends_with_every_child_gone(seed: int) -> None:
    """Random deaths, reports and pauses, then a stop: every started process ends."""
    gated = [plan("model", OnDeath.NEXT), plan("tool", OnDeath.RESTART, "page", gate=("model",))]
    gated.append(worker_plan("replaced"))
    chance, driver = random.Random(seed), MachineDriver([*PLANS, *gated])
    alive: set[str] = set()
    event: Event = TimePassed()
    for number in range(400):
        for action in driver.step(event, after_s=chance.random()):
            if isinstance(action, StartChild):
                assert action.role not in alive
                assert driver.machine.end is None
                alive.add(action.role)
            elif isinstance(action, TerminateChild | KillChild | ReleaseGate):
                assert action.role in alive
        if driver.mesh() is MeshState.ENDED:
            break
        event = some_event(chance, alive, is_late=number > 60)
    assert driver.mesh() is MeshState.ENDED
    assert alive == set()


def some_event(chance: random.Random, alive: set[str], is_late: bool) -> Event:
    """Return a random event; remove a process that it ends from `alive`."""
    dice = chance.random()
    if is_late and dice < 0.1:
        return StopRequested()
    if alive and dice < 0.3:
        role = chance.choice(sorted(alive))
        alive.discard(role)
        return ChildExited(role, chance.choice([0, 1, -9, INTERRUPTED, RECYCLED]))
    if alive and dice < 0.7:
        return ChildReady(chance.choice(sorted(alive)))
    return TimePassed()


CLUSTER = [
    plan("engine", OnDeath.RESTART),
    ChildPlan(role="router", argv=("router", "{engine}"), on_death=OnDeath.RESTART),
    worker_plan("worker"),
]


def cluster_driver() -> MachineDriver:
    driver = MachineDriver([])
    driver.machine = SupervisionMachine(CLUSTER, SETTINGS, remote=["engine", "worker"])
    return driver


def test_a_child_starts_once_the_addresses_in_its_arguments_are_known() -> None:
    driver = cluster_driver()
    assert driver.step(TimePassed()) == [StartChild("engine"), StartChild("worker")]
    assert driver.step(ChildPlaced("engine")) == [StartChild("router")]


def test_a_pending_child_is_not_overdue_and_its_reason_is_shown_once() -> None:
    driver = cluster_driver()
    driver.step(TimePassed())
    driver.step(ChildPending("worker", "waiting for 1 CPU"))
    assert driver.step(ChildPending("engine", "waiting for 1 GPU")) == [
        Notice("engine: waiting for 1 GPU")
    ]
    assert driver.step(ChildPending("engine", "waiting for 1 GPU"), SETTINGS.ready_timeout_s) == []
    assert driver.step(TimePassed(), SETTINGS.ready_timeout_s / 2) == []
    assert driver.state("engine") is ChildState.PENDING
    driver.step(ChildPlaced("engine"))
    driver.step(TimePassed(), SETTINGS.ready_timeout_s)
    assert driver.machine.end == RunEnd(1, "engine was not ready within 30 s")


def test_the_mesh_runs_while_a_worker_waits_for_a_node() -> None:
    driver = cluster_driver()
    driver.step(TimePassed())
    driver.step(ChildPlaced("engine"))
    driver.step(ChildPending("worker", "waiting for 8 CPUs"))
    driver.step(ChildReady("engine"))
    driver.step(ChildReady("router"))
    assert driver.mesh() is MeshState.RUNNING


def test_a_pending_child_ends_with_the_run() -> None:
    driver = cluster_driver()
    driver.step(TimePassed())
    driver.step(ChildPending("engine", "waiting for 1 GPU"))
    driver.step(StopRequested())
    assert driver.state("engine") is ChildState.STOPPING
    driver.step(ChildExited("engine", -15))
    driver.step(ChildExited("worker", -15))
    assert driver.mesh() is MeshState.ENDED
