"""Secrets in env_settings: named, never written out, and read where the environment is built."""

from pathlib import Path
from typing import ClassVar

import pytest

from rollmesh.core.config import load_config
from rollmesh.core.config_parsing import resolve_secrets
from rollmesh.core.errors import UserError
from rollmesh.core.redaction import redact
from rollmesh.envs.echo import EchoEnv
from rollmesh.envs.loading import load_env

SECRET = "a-literal-secret-of-mine"


class Marked(EchoEnv):
    """An environment that marks a setting as secret."""

    secret_settings: ClassVar[tuple[str, ...]] = ("phrase",)

    def __init__(self, phrase: str = "") -> None:
        super().__init__()
        self.phrase = phrase


MARKED = f"{__name__}:Marked"


@pytest.mark.parametrize(
    "key", ["api_key", "hub_token", "client_secret", "db_password", "api.inner_key", "token"]
)
def test_a_literal_secret_is_refused_by_a_line_without_it(key: str) -> None:
    with pytest.raises(UserError) as raised:
        load_config(None, [f"env_settings.{key}={SECRET}"])
    line = str(raised.value)
    name = key.rpartition(".")[2].upper()
    assert f'env_settings.{key} = {{ env = "{name}" }}' in line
    assert SECRET not in line
    assert "\n" not in line


def test_other_settings_and_declared_literals_pass() -> None:
    overrides = ["env_settings.max_token=7", "env_settings.level=hard", 'env_settings.a_key=""']
    overrides += ['env_settings.prompt_key={ value = "question" }']
    settings = load_config(None, overrides).env_settings
    assert resolve_secrets(settings) == {
        "max_token": 7,
        "level": "hard",
        "a_key": "",
        "prompt_key": "question",
    }


def test_secrets_are_read_from_variables_and_private_files_and_hidden_in_logs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "secret"
    file.write_text("from-the-file-1234\n")
    file.chmod(0o600)
    monkeypatch.setenv("MY_KEY", "from-the-variable-1234")
    settings = {"api_key": {"env": "MY_KEY"}, "list": [{"x_token": {"file": str(file)}}]}
    found = resolve_secrets(settings)
    assert found["api_key"] == "from-the-variable-1234"
    assert found["list"] == [{"x_token": "from-the-file-1234"}]
    assert redact("from-the-variable-1234 from-the-file-1234") == "[hidden] [hidden]"
    file.chmod(0o644)
    with pytest.raises(UserError, match=r"env_settings.list.x_token: .*others can read it"):
        resolve_secrets(settings)
    monkeypatch.delenv("MY_KEY")
    with pytest.raises(UserError, match="the variable is not set"):
        resolve_secrets({"api_key": {"env": "MY_KEY"}})


def test_a_setting_that_the_environment_marks_is_a_secret(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for literal in (SECRET, {"value": SECRET}):
        with pytest.raises(UserError) as raised:
            load_env(MARKED, {"phrase": literal})
        assert SECRET not in str(raised.value)
        assert 'env_settings.phrase = { env = "PHRASE" }' in str(raised.value)
    monkeypatch.setenv("PHRASE", "open-sesame-1234")
    env = load_env(MARKED, {"phrase": {"env": "PHRASE"}})
    assert isinstance(env, Marked)
    assert env.phrase == "open-sesame-1234"
