"""The supervision machine: who starts when, who starts again, and how a run ends."""

import random

import msgspec
import pytest

from rollmesh.core.config import LaunchConfig
from rollmesh.core.process import INTERRUPTED, RECYCLED
from rollmesh.launch.causes import OUT_OF_MEMORY
from rollmesh.launch.machine import (
    LOOP_WINDOW_S,
    SHORTEST_LIFE_S,
    SPARE_S,
    Aborted,
    Action,
    Beaten,
    ChildState,
    End,
    Event,
    Exited,
    Kill,
    MeshState,
    Note,
    Release,
    Reported,
    Start,
    StopAsked,
    Supervision,
    Tell,
    TellRouter,
    Ticked,
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
    plan("page", OnDeath.GIVE_UP),
]


class Stage:
    """A machine and its clock."""

    def __init__(self, plans: list[ChildPlan] = PLANS, settings: LaunchConfig = SETTINGS) -> None:
        self.machine = Supervision(plans, settings)
        self.clock = FakeClock()

    def tell(self, event: Event, after_s: float = 0.0) -> list[Action]:
        self.clock.advance(after_s)
        return self.machine.step(event, self.clock.now_s())

    def run_all(self) -> None:
        self.tell(Ticked())
        for role in self.machine.children:
            self.tell(Reported(role))

    def mesh(self) -> MeshState:
        return self.machine.state

    def state(self, role: str) -> ChildState:
        return self.machine.children[role].state


@pytest.fixture
def stage() -> Stage:
    return Stage()


@pytest.fixture
def running(stage: Stage) -> Stage:
    stage.run_all()
    assert stage.mesh() is MeshState.RUNNING
    return stage


def test_a_child_starts_only_when_all_it_needs_is_there(stage: Stage) -> None:
    assert stage.tell(Ticked()) == [Start("engine"), Start("router"), Start("page")]
    assert stage.tell(Reported("engine")) == []
    assert stage.tell(Reported("router")) == [Start("worker"), Start("trainer")]


def test_the_mesh_runs_when_every_child_has_reported(stage: Stage) -> None:
    stage.tell(Ticked())
    for role in ("engine", "router", "page", "worker"):
        stage.tell(Reported(role))
        assert stage.mesh() is MeshState.STARTING
    stage.tell(Reported("trainer"))
    assert stage.mesh() is MeshState.RUNNING


def test_a_task_lets_the_others_start_when_it_is_done() -> None:
    stage = Stage([plan("model", OnDeath.NEXT), plan("engine", OnDeath.END, "model")])
    assert stage.tell(Ticked()) == [Start("model")]
    assert stage.tell(Exited("model", 0)) == [Start("engine")]
    assert stage.state("model") is ChildState.DONE


def test_a_gated_child_is_started_early_and_held_until_its_gate_opens() -> None:
    held = plan("engine", OnDeath.END, gate=("model",))
    stage = Stage([plan("model", OnDeath.NEXT), held])
    assert stage.tell(Ticked()) == [Start("model"), Start("engine")]
    assert stage.state("engine") is ChildState.HELD
    assert stage.tell(Ticked(), after_s=1000.0) == []
    assert stage.tell(Exited("model", 0)) == [Release("engine")]
    assert stage.tell(Ticked(), after_s=29.0) == []
    stage.tell(Ticked(), after_s=1.0)
    assert stage.machine.end == End(1, "engine did not report within 30 s")


def test_a_gated_child_that_starts_again_passes_at_once() -> None:
    gated = plan("worker", OnDeath.RESTART, gate=("model",))
    stage = Stage([plan("model", OnDeath.NEXT), gated])
    stage.tell(Ticked())
    stage.tell(Exited("model", 0))
    stage.tell(Exited("worker", -9))
    assert stage.tell(Ticked(), after_s=1.0) == [Start("worker"), Release("worker")]


def test_a_held_child_stops_and_dies_like_any_other() -> None:
    held = plan("engine", OnDeath.END, gate=("model",))
    stage = Stage([plan("model", OnDeath.NEXT), held])
    stage.tell(Ticked())
    assert stage.tell(StopAsked()) == [Tell("model"), Tell("engine")]
    again = Stage([plan("model", OnDeath.NEXT), held])
    again.tell(Ticked())
    again.tell(Exited("engine", 1))
    assert again.machine.end == End(1, "engine ended with code 1")


def test_a_task_has_all_the_time_it_needs_but_must_not_fail() -> None:
    stage = Stage([plan("model", OnDeath.NEXT), plan("engine", OnDeath.END, "model")])
    stage.tell(Ticked())
    assert stage.tell(Ticked(), after_s=1000.0) == []
    stage.tell(Exited("model", 1, "ValueError: no"))
    assert stage.machine.end == End(1, "model ended with code 1: ValueError: no")


def test_a_child_that_does_not_report_in_time_ends_the_start(stage: Stage) -> None:
    stage.tell(Ticked())
    stage.tell(Ticked(), after_s=29.0)
    assert stage.machine.end is None
    stage.tell(Ticked(), after_s=1.0)
    assert stage.machine.end == End(1, "engine did not report within 30 s")


def test_a_users_mistake_ends_the_run_with_its_own_line(stage: Stage) -> None:
    stage.tell(Ticked())
    stage.tell(Exited("engine", 2, "rollmesh: model.path = x: no such folder"))
    assert stage.machine.end == End(2, "model.path = x: no such folder")


def test_what_a_worker_complains_of_when_it_is_started_again_is_a_death_like_others(
    running: Stage,
) -> None:
    # It has served with these settings: what fails now is around it, and others serve on.
    complaint = "rollmesh: env = x: module x cannot be imported: OSError: stale file handle"
    running.tell(Exited("worker", -9))
    running.tell(Ticked(), after_s=1.0)
    [note] = running.tell(Exited("worker", 2, complaint))
    assert isinstance(note, Note)
    assert note.line.endswith("stale file handle; started again in 1 s")
    running.tell(Ticked(), after_s=1.0)
    running.tell(Exited("worker", 2, complaint))
    reason = f"worker ended with code 2: {complaint}, the death number 3 within a minute"
    assert running.machine.end == End(1, reason)


def test_what_a_trainer_complains_of_late_is_still_its_users_to_mend(running: Stage) -> None:
    running.tell(Exited("trainer", 2, "rollmesh: journal.max_bytes = 1: too little"))
    assert running.machine.end == End(2, "journal.max_bytes = 1: too little")


def test_a_worker_started_again_that_does_not_report_is_killed_and_ends_nobody_else(
    running: Stage,
) -> None:
    running.tell(Exited("worker", -9))
    assert running.tell(Ticked(), after_s=1.0) == [Start("worker")]
    assert running.tell(Ticked(), after_s=29.0) == []
    assert running.tell(Ticked(), after_s=1.0) == [Kill("worker")]
    running.tell(Exited("worker", -9))
    assert running.tell(Ticked(), after_s=1.0) == [Start("worker")]
    assert running.machine.end is None


@pytest.mark.parametrize("role", ["engine", "router"])
def test_the_death_of_what_cannot_be_replaced_ends_the_run(running: Stage, role: str) -> None:
    running.tell(Exited(role, -9))
    assert running.machine.end == End(1, f"{role} was ended by signal 9")


@pytest.mark.parametrize("code", [1, -9])
def test_a_trainer_that_dies_is_started_again_beside_all_others(running: Stage, code: int) -> None:
    running.tell(Exited("trainer", code))
    assert running.tell(Ticked(), after_s=0.6) == [Start("trainer")]
    assert running.machine.end is None


def test_a_trainer_that_is_done_ends_the_run_well(running: Stage) -> None:
    actions = running.tell(Exited("trainer", 0))
    assert running.machine.end == End(0, "done")
    assert actions == [Tell("engine"), Tell("router"), Tell("worker"), Tell("page")]


def test_a_worker_that_dies_starts_again_after_a_pause_that_grows(running: Stage) -> None:
    [note] = running.tell(Exited("worker", -9))
    assert isinstance(note, Note)
    assert "worker was ended by signal 9" in note.line
    assert running.tell(Ticked(), after_s=0.4) == []
    assert running.tell(Ticked(), after_s=0.2) == [Start("worker")]
    running.tell(Exited("worker", 1))
    assert running.tell(Ticked(), after_s=0.9) == []
    assert running.tell(Ticked(), after_s=0.2) == [Start("worker")]
    assert running.machine.end is None


@pytest.mark.parametrize("role", ["worker", "trainer"])
def test_a_crash_loop_ends_the_run_with_the_reason(running: Stage, role: str) -> None:
    for _ in range(SETTINGS.max_restarts):
        running.tell(Exited(role, 1, "boom"))
        running.tell(Ticked(), after_s=5.0)
    running.tell(Exited(role, 1, "boom"))
    reason = f"{role} ended with code 1: boom, the death number 3 within a minute"
    assert running.machine.end == End(1, reason)


@pytest.fixture
def crew() -> Stage:
    """Two workers, as the router knows them."""
    stage = Stage([worker_plan("w0"), worker_plan("w1")])
    stage.run_all()
    return stage


def wait(stage: Stage, seconds: int, *beating: str) -> list[Action]:
    """Let time pass, a second at a time, with heartbeats of these children alone."""
    actions = []
    for _ in range(seconds):
        actions += stage.tell(Ticked(), after_s=1.0)
        for role in beating:
            actions += stage.tell(Beaten(role))
    return actions


@pytest.mark.parametrize("role", ["worker", "trainer", "page"])
def test_a_process_whose_heartbeats_stop_is_shown_then_killed_and_started_again(
    running: Stage, role: str
) -> None:
    others = [each for each in running.machine.children if each != role]
    running.tell(Beaten(role))
    [note] = wait(running, 89, *others)
    assert isinstance(note, Note)
    assert note.line.startswith(f"{role} has not answered for 30 s")
    assert wait(running, 5, *others) == [Kill(role)], "once"
    exited = running.tell(Exited(role, -9))
    assert exited[-1] == Note(f"{role} was killed: no heartbeat for 90 s; started again in 0.5 s")
    assert wait(running, 1, *others) == [Start(role)]
    running.tell(Reported(role))
    assert wait(running, 300, *others) == [], "its successor has not sent one yet"


def test_a_process_that_answers_again_in_time_is_left_alone(running: Stage) -> None:
    running.tell(Beaten("worker"))
    wait(running, 80)
    assert running.tell(Beaten("worker")) == [Note("worker answers again after 80 s")]
    assert wait(running, 29) == []


def test_a_process_without_heartbeats_is_no_business_of_the_watch(running: Stage) -> None:
    assert wait(running, 1000) == []


def test_a_suspended_machine_kills_nothing(running: Stage) -> None:
    running.tell(Beaten("worker"))
    wait(running, 10)
    assert running.tell(Ticked(), after_s=3600.0) == [], "launch did not run either"
    assert wait(running, 19) == []


def test_heartbeats_are_not_watched_where_that_is_switched_off() -> None:
    stage = Stage(settings=msgspec.structs.replace(SETTINGS, hang_timeout_s=0.0))
    stage.run_all()
    stage.tell(Beaten("worker"))
    assert wait(stage, 1000) == []


def test_the_router_is_told_of_a_worker_s_end_and_its_cause(crew: Stage) -> None:
    death = Exited("w0", -9, "", 41, "killed by signal 9")
    assert crew.tell(death)[0] == TellRouter("w0", 41, "killed by signal 9")


def test_the_router_is_not_told_of_others_or_at_the_end_of_a_run(
    running: Stage, crew: Stage
) -> None:
    actions = running.tell(Exited("trainer", 1, "", 41, "exit code 1"))
    crew.tell(StopAsked())
    actions += crew.tell(Exited("w0", 0, "", 41, "exit code 0"))
    assert not any(isinstance(each, TellRouter) for each in actions)


def test_want_of_memory_is_said_to_people(crew: Stage) -> None:
    notes = crew.tell(Exited("w0", -9, "", 41, OUT_OF_MEMORY))
    assert notes[-1] == Note("w0 ran out of memory; started again in 0.5 s")


def test_a_drained_worker_stays_away_and_the_run_goes_on(crew: Stage) -> None:
    actions = crew.tell(Exited("w0", 0, "", 41, "exit code 0"))
    assert actions[-1] == Note("w0 was drained and is not started again")
    assert crew.tell(Ticked(), after_s=100.0) == []
    assert (crew.state("w0"), crew.mesh()) == (ChildState.GONE, MeshState.RUNNING)


def test_a_crash_while_an_environment_loads_names_it() -> None:
    worker = msgspec.structs.replace(worker_plan("w0"), loads="env = my_env:MyEnv")
    stage = Stage([worker])
    stage.tell(Ticked())
    notes = stage.tell(Exited("w0", -11, "", 41, "killed by signal 11"))
    how = "w0 was ended by signal 11 while it loaded env = my_env:MyEnv"
    assert notes[-1] == Note(f"{how}; started again in 0.5 s")
    stage.tell(Ticked(), after_s=1.0)
    stage.tell(Reported("w0"))
    notes = stage.tell(Exited("w0", -11, "", 42, "killed by signal 11"))
    assert notes[-1] == Note("w0 was ended by signal 11; started again in 1 s")


def test_a_run_whose_last_worker_was_drained_says_that_none_is_left(crew: Stage) -> None:
    crew.tell(Exited("w0", 0, "", 41, "exit code 0"))
    [*_, note] = crew.tell(Exited("w1", 0, "", 42, "exit code 0"))
    assert isinstance(note, Note)
    assert "no worker of this run is left" in note.line


@pytest.mark.parametrize("role", ["trainer", "worker", "page"])
def test_a_process_that_was_stopped_by_a_signal_of_another_is_started_again(
    running: Stage, role: str
) -> None:
    [note] = running.tell(Exited(role, INTERRUPTED, "a warning of some library"))
    stopped = f"{role} was stopped by a signal that launch did not send"
    assert note == Note(f"{stopped}; started again in 0.5 s")
    assert running.tell(Ticked(), after_s=0.6) == [Start(role)]
    assert running.machine.end is None


def test_a_worker_that_was_stopped_by_a_signal_of_another_has_a_successor(crew: Stage) -> None:
    crew.tell(Exited("w0", INTERRUPTED, "", 41, "exit code 130"))
    assert crew.tell(Ticked(), after_s=0.6) == [Start("w0")]


def test_a_worker_that_recycled_itself_has_a_successor_at_once(crew: Stage) -> None:
    for _ in range(2 * SETTINGS.max_restarts):
        crew.tell(Ticked(), after_s=SHORTEST_LIFE_S)
        actions = crew.tell(Exited("w0", RECYCLED, "600 MB", 41, "exit code 75"))
        assert actions[1:] == [Note("w0 has recycled itself: 600 MB"), Start("w0")]
        crew.tell(Reported("w0"))
    assert crew.machine.end is None


def test_a_worker_that_does_nothing_but_recycle_itself_ends_the_run(crew: Stage) -> None:
    for _ in range(SETTINGS.max_restarts + 1):
        crew.tell(Exited("w0", RECYCLED, "600 MB", 41, "exit code 75"))
        crew.tell(Ticked(), after_s=5.0)
    assert crew.machine.end
    assert crew.machine.end.reason.endswith("600 MB, the death number 3 within a minute")


def test_deaths_far_apart_are_no_crash_loop(running: Stage) -> None:
    for _ in range(10):
        running.tell(Exited("worker", 1))
        assert running.tell(Ticked(), after_s=LOOP_WINDOW_S) == [Start("worker")]
        running.tell(Reported("worker"))
    assert running.machine.end is None


def test_a_run_goes_on_without_a_page_that_keeps_dying(running: Stage) -> None:
    for _ in range(SETTINGS.max_restarts + 1):
        running.tell(Exited("page", 1))
        running.tell(Ticked(), after_s=5.0)
    assert running.machine.end is None
    assert running.state("page") is ChildState.GONE
    assert running.mesh() is MeshState.RUNNING


def test_a_stop_lets_the_trainer_save_before_the_others_go(running: Stage) -> None:
    assert running.tell(StopAsked()) == [Tell("trainer")]
    assert running.mesh() is MeshState.SAVING
    others = [Tell("engine"), Tell("router"), Tell("worker"), Tell("page")]
    assert running.tell(Exited("trainer", 0)) == others
    assert running.mesh() is MeshState.STOPPING
    for role in ("engine", "router", "worker", "page"):
        running.tell(Exited(role, 0))
    assert running.mesh() is MeshState.ENDED
    assert running.machine.end == End(130, "stopped")


def test_a_slow_trainer_does_not_use_up_the_others_time(running: Stage) -> None:
    running.tell(StopAsked())
    assert running.tell(Ticked(), after_s=4.0 - SPARE_S - 0.1) == []
    assert len(running.tell(Ticked(), after_s=0.2)) == 4


def test_what_still_runs_when_time_is_up_is_killed(running: Stage) -> None:
    running.tell(StopAsked())
    running.tell(Exited("trainer", 0))
    running.tell(Exited("engine", 0))
    killed = running.tell(Ticked(), after_s=4.0)
    assert killed == [Kill("router"), Kill("worker"), Kill("page")]


def test_a_run_that_cannot_continue_is_killed_at_once(running: Stage) -> None:
    killed = running.tell(Aborted("its folder was moved"))
    assert killed == [Kill(role) for role in running.machine.children]
    assert running.machine.end == End(1, "its folder was moved")
    for role in running.machine.children:
        running.tell(Exited(role, -9))
    assert running.mesh() is MeshState.ENDED


def test_a_second_stop_kills_at_once(running: Stage) -> None:
    running.tell(StopAsked())
    killed = running.tell(StopAsked())
    assert killed == [Kill(role) for role in running.machine.children]


def test_a_stop_while_starting_starts_nothing_more(stage: Stage) -> None:
    stage.tell(Ticked())
    assert stage.tell(StopAsked()) == [Tell("engine"), Tell("router"), Tell("page")]
    assert stage.tell(Reported("router")) == []
    assert stage.state("worker") is ChildState.GONE


def test_a_stop_before_anything_started_is_the_end() -> None:
    stage = Stage()
    stage.tell(StopAsked())
    assert stage.mesh() is MeshState.ENDED


def test_a_worker_that_dies_while_stopping_stays_dead(running: Stage) -> None:
    running.tell(StopAsked())
    running.tell(Exited("worker", 1))
    actions = running.tell(Ticked(), after_s=2.0)
    assert Start("worker") not in actions
    assert running.machine.end == End(130, "stopped")


def test_words_of_an_unknown_child_change_nothing(running: Stage) -> None:
    assert running.tell(Exited("stranger", 1)) == []
    assert running.tell(Reported("stranger")) == []
    assert running.mesh() is MeshState.RUNNING


@pytest.mark.parametrize("seed", range(50))
def test_every_story_ends_with_every_child_gone(seed: int) -> None:
    """Random deaths, reports and pauses, then a stop: processes started are processes ended."""
    gated = [plan("model", OnDeath.NEXT), plan("tool", OnDeath.RESTART, "page", gate=("model",))]
    gated.append(worker_plan("replaced"))
    chance, stage = random.Random(seed), Stage([*PLANS, *gated])
    alive: set[str] = set()
    event: Event = Ticked()
    for number in range(400):
        for action in stage.tell(event, after_s=chance.random()):
            if isinstance(action, Start):
                assert action.role not in alive
                assert stage.machine.end is None
                alive.add(action.role)
            elif isinstance(action, Tell | Kill | Release):
                assert action.role in alive
        if stage.mesh() is MeshState.ENDED:
            break
        event = some_event(chance, alive, is_late=number > 60)
    assert stage.mesh() is MeshState.ENDED
    assert alive == set()


def some_event(chance: random.Random, alive: set[str], is_late: bool) -> Event:
    """What may happen next to the processes in `alive`, which loses those that end."""
    dice = chance.random()
    if is_late and dice < 0.1:
        return StopAsked()
    if alive and dice < 0.3:
        role = chance.choice(sorted(alive))
        alive.discard(role)
        return Exited(role, chance.choice([0, 1, -9, INTERRUPTED, RECYCLED]))
    if alive and dice < 0.7:
        return Reported(chance.choice(sorted(alive)))
    return Ticked()
