"""Settings of the meshes of these tests, and the check that nothing was lost or doubled."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from tests.flow.demo import read
from tests.flow.trained_mesh import SETTINGS, RunHistory

MANY_STEPS = 100_000


def settings_of(model: Path, num_steps: int = MANY_STEPS, **sections: Any) -> dict[str, Any]:
    """Settings of a mesh that trains that model."""
    trainer: Any = SETTINGS["trainer"]
    return {
        **SETTINGS,
        "model": {"path": str(model), "max_context_tokens": 512},
        "trainer": {**trainer, "num_steps": num_steps},
        **sections,
    }


def check_whole(run: Path, num_steps: int) -> None:
    """Check that each step and group was trained once and no rollout was lost."""
    history, summary = RunHistory(run), read(run / "summary.json")
    assert history.num_steps_taken == dict.fromkeys(range(num_steps), 1)
    trained = history.trained()
    assert len(set(trained)) == len(trained)
    assert (summary["num_steps"], summary["num_lost"]) == (num_steps, 0)
    assert summary["ended"] == "done"
    rollouts = [each["rollout_id"] for each in rows(run / "trajectories.jsonl")]
    assert len(set(rollouts)) == len(rollouts) == summary["num_rollouts"]
    assert not any(rows(run / "drops.jsonl"))


def rows(path: Path) -> Iterable[dict[str, Any]]:
    """Yield the rows of a file."""
    return (msgspec.json.decode(line) for line in path.read_bytes().splitlines())
