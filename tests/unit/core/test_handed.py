"""Secrets by a descriptor: read once, and kept out of the environment."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.core.errors import ConfigError
from rollmesh.core.handed import (
    SECRETS_VARIABLE,
    handed,
    open_pipe,
    receive,
    secrets_in,
    without_secrets,
)


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
    reading = open_pipe({"ROLLMESH_OF_THIS_TEST": "text"})
    environment = {SECRETS_VARIABLE: str(reading)}
    receive(environment)
    assert (handed("ROLLMESH_OF_THIS_TEST"), handed("ROLLMESH_NOT_THERE")) == ("text", None)
    assert environment == {}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(reading)


def test_a_key_file_that_others_can_read_is_refused(environment: dict[str, str]) -> None:
    Path(environment["ROLLMESH_KEYS"]).chmod(0o640)
    with pytest.raises(ConfigError, match="others can read it; chmod 600"):
        secrets_in(environment)


BY_HAND = """
import os, sys
from rollmesh.core.handed import begin_without_secrets, handed, protect_memory
begin_without_secrets()
protect_memory()
environ = open(f"/proc/{os.getpid()}/environ").read() if os.geteuid() == 0 else str(os.environ)
print("ROLLMESH_KEYS" in environ, "sesame" in environ, handed("ROLLMESH_KEYS"))
print(handed("ROLLMESH_ADMIN_TOKEN"))
import ctypes, resource
print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0), resource.getrlimit(resource.RLIMIT_CORE)[0])
"""


def test_a_process_started_by_hand_begins_again_without_secrets_in_its_environment(
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
