"""Settings of the meshes of these tests, and the check that nothing was lost or doubled."""

from pathlib import Path
from typing import Any

from rollmesh.testing.run_history import why_not_whole
from tests.flow.trained_mesh import SETTINGS

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
    assert why_not_whole(run, num_steps) == []
