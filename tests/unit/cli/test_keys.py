"""A key file is written once, for its owner only."""

import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from rollmesh.cli.main import main
from rollmesh.core.secret_file import admin_token
from rollmesh.wire.keys import Role, read_key_file, read_keys


def test_keys_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert main(["keys", str(folder)]) == 0
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.iterdir()} == {0o600}
    assert read_keys({"ROLLMESH_KEYS": str(folder)}) is not None


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
    hub = file / "hub.json"
    made = hub.read_bytes(), token.read_bytes()
    assert main(words) == 0
    assert (hub.read_bytes(), token.read_bytes()) == made
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
        return code, (file / "hub.json").read_bytes(), token.read_bytes()

    with ThreadPoolExecutor(num) as pool:
        for round_ in range(50):
            folder = tmp_path / str(round_)
            folder.mkdir()
            told = list(pool.map(start, [folder] * num))
            assert {code for code, *_ in told} == {0}
            assert len(set(told)) == 1
            assert {each.name for each in folder.iterdir()} == {"keys.json", "token"}


def test_members_are_added_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--keys", str(tmp_path / "keys")]
    assert main(["keys", "add", "worker", "--name", "gpu-7", *words]) == 0
    assert (tmp_path / "keys" / "gpu-7.json").is_file()
    capsys.readouterr()
    assert main(["keys", "list", *words]) == 0
    assert capsys.readouterr().out.split()[:2] == ["gpu-7", "worker"]
    assert main(["keys", "remove", "gpu-7", *words]) == 0
    assert main(["keys", "remove", "gpu-7", *words]) == 2
    assert "no key is named 'gpu-7'" in capsys.readouterr().err


def test_a_members_file_is_exported_without_the_hubs_secret(tmp_path: Path) -> None:
    folder, copy = tmp_path / "keys", tmp_path / "worker.json"
    words = ["keys", "--keep", "--export", f"worker={copy}", str(folder)]
    assert main(words) == 0
    assert main(words) == 0
    assert stat.S_IMODE(copy.stat().st_mode) == 0o600
    hub = read_key_file(folder)
    assert hub.secret not in copy.read_text()
    assert read_key_file(copy, Role.WORKER).hub_public == hub.public
