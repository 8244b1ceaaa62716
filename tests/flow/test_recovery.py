"""A trainer may die at any time: no finished work is lost, and nothing is trained twice.

Trainers on a running mesh are killed (-9) at moments that a seed determines, each an incarnation of
one run; then the journal, the records and the summary are compared.
"""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.core.process import OK
from rollmesh.envs.guess import GuessEnv
from rollmesh.testing.run_history import RunHistory
from tests.flow.trained_mesh import TrainedMesh
from tests.flow.trained_mesh import model as model  # the fixture

NUM_KILLS = 5
MOST_STEPS = 4
"""The most steps that an incarnation does beyond the known ones before it is killed."""
LONGEST_PAUSE_S = 0.4
"""Longest time between the last of them and the kill, about as long as a step or a trainer's
start.
"""
CURVE = ("loss", "entropy", "kl", "grad_norm", "success", "reward", "num_tokens", "age_histogram")


@pytest.fixture
def mesh(tmp_path: Path, model: Path) -> Iterator[TrainedMesh]:
    mesh = TrainedMesh(tmp_path, model)
    yield mesh
    mesh.close()


def curve(rows: list[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """The figures of each step that a repeated step must reproduce."""
    return {row["step"]: {name: row[name] for name in CURVE} for row in rows}


@pytest.mark.slow
def test_a_trainer_that_is_killed_five_times_loses_nothing_and_trains_nothing_twice(
    mesh: TrainedMesh,
) -> None:
    check(mesh, kill_often(mesh, NUM_KILLS, seed=1))


@pytest.mark.slow
def test_a_journal_at_its_byte_budget_forces_checkpoints_and_loses_nothing(
    tmp_path: Path, model: Path
) -> None:
    journal = {"segment_bytes": 2**14, "max_bytes": 2**16}
    mesh = TrainedMesh(tmp_path, model, {"journal": journal}, checkpoint_steps=1000)
    try:
        pid = mesh.begin()
        mesh.until(num_rows=12)
        assert mesh.kill(pid) == -9
        mesh.begin()
        assert mesh.end() == OK, mesh.stderr_output()
        check_rows(mesh)
        log = (mesh.run / "logs" / "trainer.log").read_text()
        num_forced = log.count("checkpoint.saved") - log.count("publisher.closed")
        assert num_forced >= 2, "it is never due but at the end"
        sizes = [path.stat().st_size for path in (mesh.run / "journal").glob("*.journal")]
        assert sum(sizes) < 2 * journal["max_bytes"]
    finally:
        mesh.close()


@pytest.mark.chaos
@pytest.mark.timeout(3600)
def test_fifty_kills_lose_nothing_either(tmp_path: Path, model: Path) -> None:
    mesh = TrainedMesh(tmp_path, model, num_steps=300)
    try:
        check(mesh, kill_often(mesh, 50, seed=2))
    finally:
        mesh.close()


def kill_often(mesh: TrainedMesh, num_kills: int, seed: int) -> list[dict[str, Any]]:
    """Kill the trainer `num_kills` times, then run it to its end; return the rows written before
    each kill.
    """
    chance, seen = random.Random(seed), list[dict[str, Any]]()
    recoveries = [num_recoveries(mesh)]
    for _ in range(num_kills):
        pid, num_steps = mesh.begin(), len(curve(seen)) + chance.randint(0, MOST_STEPS)
        mesh.until(num_steps)
        assert mesh.outlives(chance.uniform(0.0, LONGEST_PAUSE_S)), mesh.stderr_output()
        assert mesh.kill(pid) == -9
        rows = mesh.rows("metrics.jsonl")
        is_first = not recoveries[-1] and not seen
        recoveries.append(num_recoveries(mesh))
        # A process killed before it has read the run's state is no incarnation; one that has
        # trained is.
        has_trained = len(curve(seen + rows)) > len(curve(seen))
        num_new = recoveries[-1] - recoveries[-2]
        assert num_new <= 1
        assert num_new or is_first or not has_trained
        seen += rows
    mesh.begin()
    assert mesh.end() == OK, mesh.stderr_output()
    assert num_recoveries(mesh) == recoveries[-1] + 1
    assert mesh.summary()["num_lives"] == num_recoveries(mesh) + 1
    assert mesh.summary()["num_steps_redone"] > 0
    return seen


def num_recoveries(mesh: TrainedMesh) -> int:
    """Incarnations that have reported their recovery."""
    return len(mesh.rows("recoveries.jsonl"))


def check(mesh: TrainedMesh, seen: list[dict[str, Any]]) -> None:
    """Check that the run is complete; `seen` are rows that earlier incarnations had written."""
    history, summary = RunHistory(mesh.run), mesh.summary()
    num_steps, samples = mesh.config.trainer.num_steps, mesh.config.trainer.samples_per_group
    # Each step is in the history once, and each group in one step.
    assert history.num_steps_taken == dict.fromkeys(range(num_steps), 1)
    trained = history.trained()
    assert len(set(trained)) == len(trained)
    assert sorted(set(history.policy_versions)) == history.policy_versions
    rows, rollouts = check_rows(mesh)
    steps = {str(group_id): step for step, ids in history.steps.items() for group_id in ids}
    for row in rollouts:
        assert row["step"] == steps.get(row["rollout_id"].rpartition("/")[0])
    assert summary["num_asked"] == len(history.asked) * samples
    # The curve is continuous: repeated steps reproduced their figures.
    final = curve(rows)
    for step, figures in curve(seen).items():
        assert final[step] == figures
    # Tasks are continuous too: none was skipped or repeated.
    env, seed = GuessEnv(), mesh.config.run.seed
    assert history.tasks == list(itertools.islice(env.tasks("train", seed), len(history.tasks)))


def check_rows(mesh: TrainedMesh) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Check steps and rollouts: each is there once, and each request is trained, dropped or
    open.
    """
    rows, rollouts = mesh.rows("metrics.jsonl"), mesh.rows("trajectories.jsonl")
    assert [row["step"] for row in rows] == list(range(mesh.config.trainer.num_steps))
    assert len({row["rollout_id"] for row in rollouts}) == len(rollouts)
    summary = mesh.summary()
    assert summary["num_lost"] == 0
    parts = [summary[name] for name in ("num_trained", "num_dropped", "num_open")]
    assert sum(parts) == summary["num_asked"]
    assert summary["num_rollouts"] == len(rollouts)
    return rows, rollouts
