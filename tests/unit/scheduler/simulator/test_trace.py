"""A trace file: what is read, and what is refused in one line."""

from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import UserError
from rollmesh.scheduler.simulator.trace import Phase, Trace, TracePipeline, read

EXAMPLE = Path(__file__).parents[4] / "benchmarks/traces/two.json"
GOOD = TracePipeline(
    pipeline_id="a",
    clusters={"actor_train": (0,)},
    generation=(0, 1),
    rollouts_s=((1.0, 2.0), (3.0,)),
    phases=(Phase("actor_train", 5.0),),
)


def _write(folder: Path, *pipelines: TracePipeline) -> Path:
    path = folder / "trace.json"
    path.write_bytes(msgspec.json.encode(Trace(name="x", nodes=(2,), pipelines=pipelines)))
    return path


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    trace = read(_write(tmp_path, GOOD))
    assert trace.pipelines == (GOOD,)
    assert (trace.num_gpus, GOOD.steps) == (2, 2)
    assert trace.rollouts(GOOD, 1) == (3.0,)


def test_a_spec_says_what_the_trace_says() -> None:
    spec = msgspec.structs.replace(GOOD, tp=2, weight=2.5, min_gpus=2).spec()
    assert (spec.pipeline_id, spec.tp, spec.weight, spec.min_gpus) == ("a", 2, 2.5, 2)
    assert spec.clusters == {"actor_train": (0,)}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"generation": (0, 2)}, "GPU 2"),
        ({"tp": 3}, "tp = 3"),
        ({"rollouts_s": ()}, "`lengths`"),
        ({"rollouts_per_worker": 0}, "`rollouts_per_worker`"),
        ({"phases": (Phase("critic", 1.0),)}, "cluster critic"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(
    tmp_path: Path, changes: dict[str, object], said: str
) -> None:
    with pytest.raises(UserError, match=said) as refused:
        read(_write(tmp_path, msgspec.structs.replace(GOOD, **changes)))
    assert "pipeline a" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_names_that_stand_twice_and_files_that_are_none_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two pipelines are called a"):
        read(_write(tmp_path, GOOD, GOOD))
    with pytest.raises(UserError, match="cannot read"):
        read(tmp_path / "none.json")
    (tmp_path / "trace.json").write_text("{")
    with pytest.raises(UserError, match="is not a trace"):
        read(tmp_path / "trace.json")


def test_the_example_is_a_trace() -> None:
    assert [each.steps for each in read(EXAMPLE).pipelines] == [6, 4]
