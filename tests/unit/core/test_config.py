"""Settings are read once, checked once, and a mistake in them is one line that names the key."""

from pathlib import Path

import pytest

from rollmesh.core.config import Config, load_config, write_config
from rollmesh.core.errors import ConfigError


def refused(tmp_path: Path, text: str) -> str:
    """The error that a user sees for this mesh.toml."""
    file = tmp_path / "mesh.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    error = str(caught.value)
    assert error.startswith(f"{file}: ")
    assert "\n" not in error
    return error.removeprefix(f"{file}: ")


def test_an_empty_configuration_is_valid() -> None:
    assert load_config(None) == Config()


def test_a_written_configuration_is_read_back(tmp_path: Path) -> None:
    config = load_config(None, ["trainer.num_steps=7", 'engine.urls=["http://a:1"]', "env=m:E"])
    write_config(config, tmp_path / "run" / "config.json")
    assert load_config(tmp_path / "run" / "config.json") == config


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            "foo = 1",
            "unknown key 'foo'; there are env, env_settings, pass_threshold, run, network, model, ",
        ),
        ('[router]\nbeat_s = "x"', "router.beat_s: expected `float`, got `str`"),
        ("[trainer]\nclip_low = 2.0", "trainer.clip_low: expected `float` <= 1.0"),
        ("[engine]\nurls = ['a', 3]", "engine.urls[1]: expected `str`, got `int`"),
        (
            '[trainer]\ntrain_branches = ["x"]',
            "trainer.train_branches[0]: 'x' is not one of main, ",
        ),
        ("router = 3", "router: expected `object`, got `int`"),
        ("[router", "not valid: "),
        ("[publish]\nevery_steps = 5", "publish.every_steps = 5 lets no sample be within"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(tmp_path: Path, text: str, error: str) -> None:
    assert refused(tmp_path, text).startswith(error)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("[trainer]\nnum_step = 3", "'trainer.num_step'; did you mean 'trainer.num_steps'"),
        ("[trainer]\nlr = 3", "'trainer.lr'; [trainer] has bind, advertise, num_steps, "),
        ("num_steps = 3", "'num_steps'; did you mean 'trainer.num_steps'? "),
        ("[model]\nlearning_rate = 3", "did you mean 'trainer.learning_rate'? "),
        ("[trainr]\nnum_steps = 3", "'trainr'; did you mean 'trainer'? "),
    ],
)
def test_an_unknown_key_is_answered_with_a_suggestion(
    tmp_path: Path, text: str, error: str
) -> None:
    assert error in refused(tmp_path, text)


def test_a_wrong_word_is_answered_with_the_choices(tmp_path: Path) -> None:
    assert refused(tmp_path, '[trainer]\nstale_policy = "wiat"') == (
        "trainer.stale_policy: 'wiat' is not one of wait, mask, drop, requeue; did you mean 'wait'?"
    )


def test_a_missing_file_is_reported_with_the_command_that_makes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no-such\.toml: .*`rollmesh init` writes one"):
        load_config(tmp_path / "no-such.toml")


@pytest.mark.parametrize("override", ["router.beat_s", "=3", ""])
def test_an_override_without_a_value_is_refused(override: str) -> None:
    with pytest.raises(ConfigError, match=r"write it as section\.key=value"):
        load_config(None, [override])


def test_an_override_below_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match="'env' is not a section"):
        load_config(None, ["env=guess", "env.x=1"])


def test_later_settings_win_table_by_table(tmp_path: Path) -> None:
    file = tmp_path / "mesh.toml"
    file.write_text("[trainer]\nnum_steps = 2\n[run]\nseed = 5\n")
    defaults = {"trainer": {"num_steps": 1, "groups_per_step": 3}}
    config = load_config(file, ["run.seed=6"], defaults)
    trainer = config.trainer
    assert (trainer.num_steps, trainer.groups_per_step, config.run.seed) == (2, 3, 6)


def test_a_hang_timeout_that_a_busy_machine_exceeds_is_refused(tmp_path: Path) -> None:
    error = refused(tmp_path, "[launch]\nhang_timeout_s = 3")
    assert "launch: hang_timeout_s = 3 would kill processes of a busy machine" in error
    for accepted in (0.0, 10.0):
        config = load_config(None, [f"launch.hang_timeout_s={accepted}"])
        assert config.launch.hang_timeout_s == accepted


def test_a_bare_word_is_a_string_and_the_rest_is_toml() -> None:
    config = load_config(None, ["model.path=/m/x", "dashboard.enabled=false", "run.name = one "])
    assert config.model.path == "/m/x"
    assert config.dashboard.enabled is False
    assert config.run.name == "one"


def test_defaults_have_room_for_a_worker_full_of_browsers() -> None:
    """The memory of 45 screenshots of 0.5 MB each; images without room in memory go to disk."""
    interception, worker = Config().interception, Config().worker
    in_memory = (
        interception.max_blob_bytes
        + interception.max_inflight_bytes
        + interception.max_body_bytes
        + worker.max_unacked_bytes
    )
    assert in_memory + worker.max_rollouts * 8 * 2**20 <= worker.max_held_bytes
    assert interception.max_body_bytes / 2 > 45 * 500_000
    assert interception.max_session_bytes / 10 > 45 * 500_000
