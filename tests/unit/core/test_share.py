"""A pipeline's token is read from the configured file, and otherwise from admission's folder."""

from pathlib import Path

import pytest

from rollmesh.core.errors import ConfigError
from rollmesh.core.share import TOKEN_FILE_VARIABLE, Share, token_file


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def keep(path: Path, token: str = "secret", mode: int = 0o600) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{token}\n")
    path.chmod(mode)
    return path


def test_the_token_file_is_the_first_that_is_named(folder: Path) -> None:
    kept = keep(folder / "fleet" / "tokens" / "math")
    (folder / "scheduler.toml").write_text('journal = "fleet"\n')
    environment = {TOKEN_FILE_VARIABLE: "b"}
    assert token_file("math", "a", environment) == Path("a")
    assert token_file("math", "", environment) == Path("b")
    found = token_file("math", "", {})
    assert found is not None
    assert found.samefile(kept)
    assert Share("tcp://h:1", "math").token == "secret"


@pytest.mark.parametrize("fleet", [None, "", "journal = 3", "not toml"])
def test_without_a_file_there_is_no_token(fleet: str | None, folder: Path) -> None:
    if fleet is not None:
        (folder / "scheduler.toml").write_text(fleet)
    assert token_file("math", "", {}) is None
    assert Share("tcp://h:1", "../math").token == ""


def test_a_token_that_others_can_read_is_refused_in_one_line(folder: Path) -> None:
    open_file = keep(folder / "t", mode=0o644)
    with pytest.raises(ConfigError, match="others can read it; chmod 600"):
        _ = Share("tcp://h:1", "math", str(open_file)).token
