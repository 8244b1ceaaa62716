"""Secrets come from private files or a descriptor, and stay out of argv and the environment."""

import os
import resource
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.core.errors import ConfigError
from rollmesh.core.secret_files import (
    SECRETS_VARIABLE,
    admin_token,
    handed,
    open_secrets_pipe,
    read_or_make_secret,
    read_secret,
    receive,
    secrets_in,
    without_secrets,
)


def test_a_missing_secret_file_is_created_random_and_private(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    secret = read_or_make_secret(one)
    assert stat.S_IMODE(one.stat().st_mode) == 0o600
    assert len(secret) >= 43
    assert read_or_make_secret(one) == read_secret(one) == secret
    assert read_or_make_secret(two) != secret


def test_a_file_that_cannot_be_finished_does_not_exist(tmp_path: Path) -> None:
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
    ("raw", "mode", "error"),
    [
        (b"secret\n", 0o640, "others can read it; chmod 600"),
        (b"secret\n", 0o604, "others can read it; chmod 600"),
        (b"\n", 0o600, "it should hold one line"),
        (b"two words\n", 0o600, "it should hold one line"),
        (b"a\nb\n", 0o600, "it should hold one line"),
        (b"\xff\xfe", 0o600, "not a text file"),
    ],
)
def test_an_unfit_secret_file_is_refused_in_one_line(
    tmp_path: Path, raw: bytes, mode: int, error: str
) -> None:
    path = tmp_path / "token"
    path.write_bytes(raw)
    path.chmod(mode)
    with pytest.raises(ConfigError, match=error) as raised:
        read_or_make_secret(path)
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)


def test_a_place_where_no_secret_can_be_created_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot make it: no such file or directory"):
        read_or_make_secret(tmp_path / "nowhere" / "token")
    with pytest.raises(ConfigError, match="no such file or directory"):
        read_secret(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="is a directory"):
        read_or_make_secret(tmp_path)


def test_the_admin_token_is_in_the_environment_or_in_the_file_that_it_names(
    tmp_path: Path,
) -> None:
    path = tmp_path / "token"
    secret = read_or_make_secret(path)
    in_file = {"ROLLMESH_ADMIN_TOKEN_FILE": str(path)}
    assert admin_token({}) == ""
    assert admin_token(in_file) == secret
    assert admin_token({"ROLLMESH_ADMIN_TOKEN": "sesame", **in_file}) == "sesame"
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="others can read it"):
        admin_token(in_file)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name in ("keys.json", "token"):
        (tmp_path / name).write_text("{}" if name == "keys.json" else "sesame\n")
        (tmp_path / name).chmod(0o600)
    return {
        "PATH": "/bin",
        "ROLLMESH_KEYS": str(tmp_path / "keys.json"),
        "ROLLMESH_ADMIN_TOKEN_FILE": str(tmp_path / "token"),
    }


def test_files_are_handed_over_as_their_text(environment: dict[str, str]) -> None:
    expected = {"ROLLMESH_KEYS": "{}", "ROLLMESH_ADMIN_TOKEN": "sesame"}
    assert secrets_in(environment) == expected
    assert without_secrets(environment) == {"PATH": "/bin"}
    assert secrets_in({"ROLLMESH_ADMIN_TOKEN": "open"}) == {"ROLLMESH_ADMIN_TOKEN": "open"}


def test_a_descriptor_is_read_once_and_closed() -> None:
    reading = open_secrets_pipe({"ROLLMESH_OF_THIS_TEST": "text"})
    environment = {SECRETS_VARIABLE: str(reading)}
    receive(environment)
    assert (handed("ROLLMESH_OF_THIS_TEST"), handed("ROLLMESH_NOT_THERE")) == ("text", None)
    assert environment == {}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


def test_a_key_file_that_others_can_read_is_not_handed_over(environment: dict[str, str]) -> None:
    Path(environment["ROLLMESH_KEYS"]).chmod(0o640)
    with pytest.raises(ConfigError, match="others can read it; chmod 600"):
        secrets_in(environment)


BY_HAND = """
import os, sys
from rollmesh.core.secret_files import begin_without_secrets, handed, protect_memory
begin_without_secrets()
protect_memory()
environ = open(f"/proc/{os.getpid()}/environ").read() if os.geteuid() == 0 else str(os.environ)
print("ROLLMESH_KEYS" in environ, "sesame" in environ, handed("ROLLMESH_KEYS"))
print(handed("ROLLMESH_ADMIN_TOKEN"))
import ctypes, resource
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE)[0])
"""


def test_a_process_started_by_hand_restarts_without_secrets_in_its_environment(
    environment: dict[str, str], tmp_path: Path
) -> None:
    program = tmp_path / "by_hand.py"
    program.write_text(BY_HAND)
    environment["ROLLMESH_ADMIN_TOKEN"] = "sesame"
    environment["PYTHONPATH"] = os.getcwd()
    done = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False", "{}", "sesame", "0", "0"]
