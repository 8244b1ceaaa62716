"""A key file is written once, for its owner only."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from rollmesh.cli.main import main
from rollmesh.core.secret_file import admin_token
from rollmesh.wire.keys import read_keys


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    assert main(["keys", str(file)]) == 0
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert read_keys({"ROLLMESH_KEYS": str(file)}) is not None


def test_an_existing_file_is_never_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    file.write_text("mine")
    assert main(["keys", str(file)]) == 2
    assert "choose another name" in capsys.readouterr().err
    assert file.read_text() == "mine"


def test_a_second_start_keeps_the_keys_and_the_token(tmp_path: Path) -> None:
    file, token = tmp_path / "keys.json", tmp_path / "token"
    words = ["keys", "--keep", "--admin-token-file", str(token), str(file)]
    assert main(words) == 0
    made = file.read_bytes(), token.read_bytes()
    assert main(words) == 0
    assert (file.read_bytes(), token.read_bytes()) == made
    environment = {"ROLLMESH_ADMIN_TOKEN_FILE": str(token)}
    assert admin_token(environment) == made[1].decode().strip()


def test_what_is_no_key_file_is_not_kept_silently(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "keys.json"
    file.touch(0o600)
    assert main(["keys", "--keep", str(file)]) == 2
    assert "not a key file" in capsys.readouterr().err


def test_many_that_start_at_once_share_one_pair_of_keys_and_one_token(tmp_path: Path) -> None:
    num = 4
    barrier = Barrier(num)

    def start(folder: Path) -> tuple[int, bytes, bytes]:
        file, token = folder / "keys.json", folder / "token"
        barrier.wait(30)
        code = main(["keys", "--keep", "--admin-token-file", str(token), str(file)])
        return code, file.read_bytes(), token.read_bytes()

    with ThreadPoolExecutor(num) as pool:
        for round_ in range(50):
            folder = tmp_path / str(round_)
            folder.mkdir()
            told = list(pool.map(start, [folder] * num))
            assert {code for code, *_ in told} == {0}
            assert len(set(told)) == 1
            assert {each.name for each in folder.iterdir()} == {"keys.json", "token"}
