"""Whoever writes past torch to what he fetched harms himself alone, and is told by his line."""

from pathlib import Path

import msgspec
import pytest
import torch

from rollmesh.core.errors import RankGone
from rollmesh.trainer.controller.controller import RoleCall, TrainController
from tests.flow.rank_group import plan, serving_runtime


def test_a_rank_that_scribbles_ends_and_names_the_line_and_nobody_else_sees_it(
    tmp_path: Path,
) -> None:
    crew = msgspec.structs.replace(
        plan(1, make="tests.flow.scribbler:Scribbler"), folder=str(tmp_path)
    )
    with serving_runtime() as home:
        row = home.plane.remotize(torch.ones(1000))
        with TrainController(crew, home) as controller, pytest.raises(RankGone, match="signal 11"):
            controller.call(RoleCall("sums.scribble"), [row])
        assert torch.equal(home.plane.localize(row), torch.ones(1000))
    told = (tmp_path / "logs" / "rank-0.out").read_text()
    assert "Segmentation fault" in told
    assert "in scribble" in told
