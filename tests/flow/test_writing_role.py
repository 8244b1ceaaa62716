"""A role that bypasses torch to write to fetched rows ends its own rank only, with its line."""

from pathlib import Path

import msgspec
import pytest
import torch

from rollmesh.core.errors import RankGone
from rollmesh.trainer.controller.controller import RoleCall, TrainController
from tests.flow.rank_group import plan, serving_runtime


def test_a_rank_that_writes_to_fetched_rows_ends_alone_and_names_the_line(
    tmp_path: Path,
) -> None:
    rank_plan = msgspec.structs.replace(
        plan(1, make="tests.flow.writing_role:WritingRole"), folder=str(tmp_path)
    )
    with serving_runtime() as home:
        row = home.plane.remotize(torch.ones(1000))
        with (
            TrainController(rank_plan, home) as controller,
            pytest.raises(RankGone, match="signal 11"),
        ):
            controller.call(RoleCall("sums.overwrite"), [row])
        assert torch.equal(home.plane.localize(row), torch.ones(1000))
    output = (tmp_path / "logs" / "rank-0.out").read_text()
    assert "Segmentation fault" in output
    assert "in overwrite" in output
