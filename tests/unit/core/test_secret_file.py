"""Secrets in files: made for their owner alone, refused where others can read them."""

import resource
import signal
import stat
from pathlib import Path

import pytest

from rollmesh.core.errors import ConfigError
from rollmesh.core.secret_file import admin_token, read_or_make_secret, read_secret


def test_a_missing_file_is_made_random_and_for_its_owner_alone(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    secret = read_or_make_secret(one)
    assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert len(secret) >= 43
    assert read_or_make_secret(one) == read_secret(one) == secret
    assert read_or_make_secret(two) != secret


def test_a_file_that_cannot_be_finished_is_not_there_at_all(tmp_path: Path) -> None:
    path = tmp_path / "token"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, limits[1]))
    try:
        with pytest.raises(ConfigError, match="cannot make it: file too large"):
            read_or_make_secret(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert not list(tmp_path.iterdir())
    assert read_or_make_secret(path) == read_secret(path)


@pytest.mark.parametrize(
    ("raw", "mode", "told"),
    [
        (b"secret\n", 0o640, "others can read it; chmod 600"),
        (b"secret\n", 0o604, "others can read it; chmod 600"),
        (b"\n", 0o600, "it should hold one line"),
        (b"two words\n", 0o600, "it should hold one line"),
        (b"a\nb\n", 0o600, "it should hold one line"),
        (b"\xff\xfe", 0o600, "not a text file"),
    ],
)
def test_a_file_that_is_no_good_secret_is_refused_in_one_line(
    tmp_path: Path, raw: bytes, mode: int, told: str
) -> None:
    path = tmp_path / "token"
    path.write_bytes(raw)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=told) as raised:
        read_or_make_secret(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_a_place_where_none_can_be_made_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot make it: no such file or directory"):
        read_or_make_secret(tmp_path / "nowhere" / "token")
    with pytest.raises(ConfigError, match="no such file or directory"):
        read_secret(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is a directory"):
        read_or_make_secret(tmp_path)


def test_the_admin_token_stands_in_the_environment_or_in_the_file_that_it_names(
    tmp_path: Path,
) -> None:
    path = tmp_path / "token"
    secret = read_or_make_secret(path)
    in_file = {"ROLLMESH_ADMIN_TOKEN_FILE": str(path)}
    assert admin_token({}) == ""
    assert admin_token(in_file) == secret
    assert admin_token({"ROLLMESH_ADMIN_TOKEN": "said", **in_file}) == "said"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        admin_token(in_file)
