"""A rank whose disk is full reports it to the others, and leaves none of them waiting for it."""

from pathlib import Path

import msgspec
import pytest

from rollmesh.trainer.controller.rendezvous import RankContext
from rollmesh.trainer.ranked import PolicyRole
from tests.disks import no_new_folders
from tests.unit.trainer.exact import SETTINGS


def test_weights_that_one_rank_cannot_store_are_reported_by_all(
    context: RankContext, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    role, folder = PolicyRole(context, str(tiny_folder), msgspec.to_builtins(SETTINGS)), "v000001"
    with no_new_folders(monkeypatch, tmp_path):
        answer = msgspec.json.decode(role.export(str(tmp_path / folder), 1))
    assert "v000001: cannot be written: no space left" in answer["refused"]
    answer = msgspec.json.decode(role.export(str(tmp_path / folder), 1))
    assert (answer["refused"], len(answer["parts"])) == ("", 1)
