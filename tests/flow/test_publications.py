"""Publications on real engines: exact engines are never fenced, engines that ignore updates are
found.

A trainer's own policy, publisher and router, and embedded engines over HTTP.
"""

import asyncio
import sys
from pathlib import Path

import pytest

from rollmesh.core.process import USAGE
from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model
from rollmesh.trainer.weights.publisher import PublishReport
from tests.contract.processes import embedded_engine
from tests.flow.faulty_engine import ignoring
from tests.publications import publications

BF16 = ("--weight-version", "0", "--dtype", "bfloat16")
TINY_STEPS = 1e-9
"""A learning rate at which a step moves no bfloat16 weight and hardly a float32 one."""
SMALL_STEPS = 1e-6
STEPS_EACH = 100
MAX_PUBLICATIONS = 60


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, ["higher lower correct"] * 50, TinyShape(), 0)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "num",
    [20, pytest.param(1000, marks=[pytest.mark.chaos, pytest.mark.timeout(3600)])],
)
@pytest.mark.parametrize("learning_rate", [0.0, TINY_STEPS], ids=["default", "1e-9"])
def test_exact_bfloat16_engine_accepts_every_publication(
    learning_rate: float, num: int, model: Path, tmp_path: Path
) -> None:
    with (
        embedded_engine(model, *BF16) as engine,
        publications(model, [engine.address], tmp_path, learning_rate) as run,
    ):
        for _ in range(num):
            assert run.publish().updated == (engine.address,)
            run.train()
        assert run.doubted() == []


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_bfloat16_engine_that_ignores_updates_of_small_steps_is_found(
    model: Path, tmp_path: Path
) -> None:
    with embedded_engine(model, *BF16) as exact:
        async with ignoring(model, *BF16) as stuck:
            report = await asyncio.to_thread(_find, model, tmp_path, exact.address, stuck)
            assert report.updated == (exact.address,)
            [failure] = report.failed
            assert failure.startswith(f"{stuck}: scoring: ")
            assert "since version 1" in failure
            assert "it seems to ignore updates" in failure


def _find(model: Path, folder: Path, exact: str, stuck: str) -> PublishReport:
    """Publish small steps until an engine fails; return that publication's report."""
    with publications(model, [exact, stuck], folder, SMALL_STEPS) as run:
        assert set(run.publish().updated) == {exact, stuck}
        for _ in range(MAX_PUBLICATIONS):
            run.train(STEPS_EACH)
            report = run.publish()
            assert exact in report.updated
            if report.failed:
                return report
    raise AssertionError("no engine was found to ignore updates")


@pytest.mark.slow
async def test_a_run_whose_engine_accepts_no_update_ends_with_the_reason(
    model: Path, tmp_path: Path
) -> None:
    other, settings = tmp_path / "other", tmp_path / "mesh.toml"
    settings.write_text(f'[model]\npath = "{model}"\n')
    write_tiny_model(other, ["higher lower correct"] * 50, TinyShape(), 1)
    async with ignoring(other, "--weight-version", "0", num_loads=0) as engine:
        args = ["up", "--no-live"]
        for setting in (
            f"model.path={model}",
            "model.max_context_tokens=512",
            f'engine.urls=["{engine}"]',
            f"run.folder={tmp_path}",
            "publish.accept_timeout_s=3",
            "dashboard.enabled=false",
        ):
            args += ["--set", setting]
        argv = [sys.executable, "-m", "rollmesh.cli.main", *args]
        run = await asyncio.create_subprocess_exec(
            *argv, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await run.communicate()
    why = f"{engine}: scoring: its log-probs differ from the trainer's by "
    assert f"no engine serves: {why}" in out.decode()
    assert run.returncode == USAGE
    assert "publish.accept_timeout_s = 3: no engine accepted new weights" in err.decode()
    assert why in err.decode()
