"""Without a controller: the same loop under a plain torchrun, with nothing to free."""

import json
import re
import subprocess
import sys

import pytest

from rollmesh.core.errors import ConfigError
from rollmesh.trainer.controller.torchrun import PlainRank
from tests.flow.rank_group import plan

pytestmark = pytest.mark.slow

TORCHRUN = [
    *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
    *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"),
]
EXAMPLE = ["-m", "examples.ranks.train", "--steps", "3"]


def started(argv: list[str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)


def output_of(process: "subprocess.Popen[str]") -> str:
    output, _ = process.communicate()
    assert process.returncode == 0
    return output


def test_a_loop_has_the_same_curve_with_and_without_a_controller() -> None:
    with started([*TORCHRUN, *EXAMPLE]) as plain, started([sys.executable, *EXAMPLE]) as led:
        line = re.compile(r"loss (\S+)  (\d+) tokens .*  (\d+) batches drawn ahead")
        curves = [line.findall(output_of(each)) for each in (plain, led)]
    assert len(curves[0]) == 3
    assert curves[0] == curves[1]
    assert {num_ahead for *_, num_ahead in curves[0]} == {"1"}, "as both set by `staleness`"


def test_a_plain_rank_calls_its_own_roles_and_holds_nothing() -> None:
    with started([*TORCHRUN, "-m", "tests.flow.plain_program"]) as program:
        values = json.loads(output_of(program))
    assert values["is_as_it_was"]
    assert values["plane"] == [True, True], "no store, and no fetch buffer"
    assert values["own"] == [0.0, 1.0, 1], "of one row of zeros"
    assert values["of_all"] == [3.0 + 6.0, (1 * 1.0 + 2 * 2.0) / 3, 1], "a mean weighs by rows"
    assert values["twice"] == [0.0, 0.0, 0.0], "one's own row, whatever the others had"
    assert values["setting"] == "blue"
    assert values["error"] == "no sums.nothing here: sums"
    assert values["held"] == [0, 0, 0]
    assert values["capacity"] == [4, 3], "what is seen is what paces"


@pytest.mark.parametrize(
    ("world_size", "line"),
    [(None, "WORLD_SIZE is not set: start this by torchrun"), ("4", "started 4 ranks, the plan")],
)
def test_a_plain_rank_outside_of_the_plan_is_refused(
    monkeypatch: pytest.MonkeyPatch, world_size: str | None, line: str
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(ConfigError, match=line):
        PlainRank(plan(2))
