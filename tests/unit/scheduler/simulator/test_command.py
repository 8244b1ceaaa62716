"""`rollmesh scheduler simulate` and `gantt`."""

import json
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import UserError
from rollmesh.scheduler.simulator.comparison import gantt, simulate
from rollmesh.scheduler.simulator.trace import Trace, WorkloadShape, generate_trace, read_trace

TINY = WorkloadShape(
    block_gpus=4,
    node_gpus=4,
    train_gpus=(2,),
    tp=(1, 2),
    rollouts_per_step=(24, 48),
    num_steps=(1, 2),
)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.json"
    path.write_bytes(msgspec.json.encode(generate_trace(TINY, 2, 0)))
    return path


def test_a_trace_is_compared_under_all_policies_and_drawn(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate([str(trace), "--out", str(tmp_path / "drawn")]) == 0
    output = capsys.readouterr().out
    for word in ("static", "gap-ratio", "fair", "bound", "steps_per_h_gpu", "jain"):
        assert word in output
    names = {path.name for path in (tmp_path / "drawn").iterdir()}
    assert names == {"gantt.html", "gantt.png", "perfetto.json", "trace.json"}
    assert read_trace(tmp_path / "drawn/trace.json") == msgspec.json.decode(
        trace.read_bytes(), type=Trace
    )


def test_figures_are_printed_as_json_for_the_requested_policies(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate([str(trace), "--policy", "fair", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert list(output["policies"]) == ["fair"]
    assert set(output["policies"]["fair"]["slowdowns"]) == {"p0", "p1"}
    assert output["bound_steps_per_h_gpu"] >= output["policies"]["fair"]["steps_per_h_gpu"]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--pipelines 0"):
        simulate(["--pipelines", "0"])
    with pytest.raises(UserError, match="does not exist"):
        gantt([str(tmp_path / "none")])
