"""scheduler.toml is checked where it is read, and a mistake is one line that names its key."""

import math
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import ConfigError
from rollmesh.scheduler.admission.fleet_file import (
    FleetTables,
    NodeTable,
    PipelineTable,
    fleet_of,
    read_fleet,
    settings_of,
)
from rollmesh.scheduler.planning.policies.fair import FairSettings
from rollmesh.scheduler.service.settings import SchedulerSettings

WHOLE = """
bind = "tcp://127.0.0.1:9000"
policy = "gap-ratio"

[service]
coordinator_grace_s = 3

[[nodes]]
name = "a"
gpus = 4
labels = ["h200"]

[pipelines.math]
clusters.actor_train = [0, 1]
clusters.critic = 2
generation = [0, 1, 2, 3]
tp = 2
weight = 2
"""


def fleet(text: str) -> FleetTables:
    return fleet_of(tomllib.loads(text), "scheduler.toml")


def test_what_the_file_says_is_read_and_the_rest_has_defaults(tmp_path: Path) -> None:
    path = tmp_path / "scheduler.toml"
    path.write_text(WHOLE)
    read = read_fleet(path)
    assert (read.bind, read.policy, read.journal) == (
        "tcp://127.0.0.1:9000",
        "gap-ratio",
        "scheduler",
    )
    assert read.service == {"coordinator_grace_s": 3.0}
    (node,) = read.nodes
    assert (node.name, node.gpus, node.labels) == ("a", 4, ("h200",))
    math = read.pipelines["math"]
    assert math.clusters == {"actor_train": (0, 1), "critic": 2}
    assert (math.generation, math.tp, math.weight, math.preemptible) == ((0, 1, 2, 3), 2, 2.0, True)


def test_an_empty_file_is_a_fleet_that_agents_join() -> None:
    assert fleet("") == FleetTables()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("gpus = 4", "unknown key 'gpus'; docs/scheduler.md lists all keys"),
        ("policy = 'fairest'", "policy: invalid enum value 'fairest'"),
        ("[[nodes]]\nname = 'a'\nspeed = 1\ngpus = 1", "unknown key 'nodes[0].speed'; docs"),
        ("[[nodes]]\nname = 'a'", "nodes[0]: object missing required field `gpus`"),
        (
            "nodes = [{name = 'a', gpus = 1}, {name = 'a', gpus = 2}]",
            "nodes: 'a' stands there twice",
        ),
        ("pipelines = 3", "pipelines: write each as a table [pipelines.NAME]"),
        ("[pipelines]\nmath = 1", "pipelines.math: expected `object`, got `int`"),
        ("[pipelines.math]\nworker = 1", "unknown key 'pipelines.math.worker'; docs"),
        ("[pipelines.math]\nweight = 0", "pipelines.math.weight: expected `float` > 0"),
        ("[pipelines.'a/b']\nworkers = 1", "pipelines.a/b: a name is one word"),
        ("[pipelines.math]", "pipelines.math.clusters: it wants no GPU at all"),
        ("[pipelines.math]\nworkers = 1\ngeneration = [0]", "pipelines.math.workers: the numbers"),
        (
            "[pipelines.math]\ngeneration = [0, 1, 2]\ntp = 2",
            "pipelines.math.generation: 3 GPUs are",
        ),
        (
            "[pipelines.math]\nworkers = 1\ntp = 2\nmax_gpus = 1",
            "pipelines.math.max_gpus: 1 is less",
        ),
        ("[pipelines.math]\nworkers = 1\nmin_gpus = 2", "pipelines.math.min_gpus: 2 is more"),
        ("[pipelines.math]\nclusters.actor_infer = 1", "pipelines.math.clusters.actor_infer: that"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(text: str, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet(text)
    assert str(caught.value).startswith(f"scheduler.toml: {told}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_says_where_one_comes_from(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*; `rollmesh scheduler init` writes one"):
        read_fleet(tmp_path / "scheduler.toml")


def test_seconds_are_settings_of_those_who_have_them() -> None:
    assert settings_of({"hold_s": 2.0}, FairSettings, "[fair]") == FairSettings(hold_s=2.0)
    with pytest.raises(ConfigError, match=r"\[fair\]: unknown key 'holds_s'; there are quan"):
        settings_of({"holds_s": 2.0}, FairSettings, "[fair]")
    with pytest.raises(ConfigError, match=r"\[fair\]\.hold_s: nan is no time"):
        settings_of({"hold_s": math.nan}, FairSettings, "[fair]")
    with pytest.raises(ConfigError, match=r"\[fair\]\.hold_s: -1 is no time"):
        settings_of({"hold_s": -1.0}, FairSettings, "[fair]")


@pytest.mark.parametrize(("name", "num"), [("eight", 8), ("two", 2)])
def test_the_example_fleets_are_read(name: str, num: int) -> None:
    path = Path(__file__).parents[4] / f"examples/fleet/{name}.toml"
    assert len(read_fleet(path).pipelines) == num


@pytest.mark.parametrize(
    "kind", [FleetTables, NodeTable, PipelineTable, FairSettings, SchedulerSettings]
)
def test_the_docs_list_all_keys(kind: type[msgspec.Struct]) -> None:
    page = (Path(__file__).parents[4] / "docs/scheduler.md").read_text()
    for key in kind.__struct_fields__:
        assert re.search(rf"[`\[\n.]{key}\b", page), f"docs/scheduler.md has no {key}"
