"""A registered policy is accepted wherever a policy is named, and nothing else needs to know it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import pytest

from rollmesh.cli.main import main
from rollmesh.core.errors import ConfigError
from rollmesh.scheduler.admission.fleet_file import policy_of, read_fleet
from rollmesh.scheduler.planning import policies
from rollmesh.scheduler.planning.plan import PlanBuilder
from rollmesh.scheduler.planning.planner import PolicyResult
from rollmesh.scheduler.planning.policies import make_policy, policy_names, register_policy
from rollmesh.scheduler.planning.policies.static import Static


class LazySettings(msgspec.Struct, frozen=True):
    pause_s: Annotated[float, msgspec.Meta(ge=0.0, le=10.0)] = 1.0


@pytest.fixture(autouse=True)
def lazy_policy() -> Iterator[None]:
    class Lazy:
        name = "lazy"
        Settings = LazySettings
        reserve_after_s = 60.0

        def __init__(self, settings: LazySettings | None = None) -> None:
            self.settings = settings or LazySettings()

        def generate(self, builder: PlanBuilder) -> PolicyResult:
            return Static().generate(builder)

    register_policy(Lazy)
    yield
    del policies._policies["lazy"]  # noqa: SLF001 - policies are never unregistered elsewhere


def test_a_fleet_file_names_it_with_its_settings(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text('policy = "lazy"\n[lazy]\npause_s = 3\n')
    policy = policy_of(read_fleet(path), str(path))
    assert policy.name == "lazy"
    assert policy.settings == LazySettings(pause_s=3)  # type: ignore[attr-defined]
    path.write_text("[lazy]\npause_s = 30\n")
    with pytest.raises(ConfigError, match=r"\[lazy\]\.pause_s: 30 "):
        policy_of(read_fleet(path), str(path))
    path.write_text('policy = "lazie"\n')
    with pytest.raises(ConfigError, match="did you mean 'lazy'"):
        read_fleet(path)


def test_a_table_of_a_policy_without_settings_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text("[static]\npause_s = 3\n")
    with pytest.raises(ConfigError, match="unknown key 'static'"):
        read_fleet(path)


def test_the_simulator_compares_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["scheduler", "simulate", "--policy", "lazy"]) == 0
    assert "lazy" in capsys.readouterr().out


def test_init_lists_it(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.toml"
    assert main(["scheduler", "init", str(path)]) == 0
    assert "# one of: fair, gap-ratio, lazy, static" in path.read_text()


def test_every_registered_policy_is_made_by_its_name() -> None:
    assert [make_policy(name).name for name in policy_names()] == [*policy_names()]
