"""scheduler.toml is checked where it is read, and a mistake is one line that names its key."""

import math
import tomllib
from pathlib import Path

import pytest
from msgspec.structs import fields

from rollmesh.core.errors import ConfigError
from rollmesh.scheduler.admission.fleet_file import (
    FleetTables,
    convert_fleet,
    convert_settings,
    read_fleet,
)
from rollmesh.scheduler.planning.policies.fair import FairSettings
from rollmesh.scheduler.service.state import SchedulerSettings

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


RANGES = {
    "patience_s": (2, 1e6),
    "memory_s": (2, 1e6),
    "resize_deadline_s": (1, 1e6),
    "sleep_deadline_s": (1, 1e6),
    "turn_s": (1, 1e6),
    "join_s": (1, 1e6),
    "coordinator_grace_s": (2, 1e6),
    "node_grace_s": (2, 1e6),
    "retry_s": (1, 1e6),
    "max_retry_s": (1, 1e6),
    "stall_s": (1, 1e6),
    "tick_s": (0.01, 10),
    "quantum_s": (0.1, 1e6),
}
"""Times that may not be 0, since heartbeats are sent each second."""


def fleet(text: str) -> FleetTables:
    return convert_fleet(tomllib.loads(text), "scheduler.toml")


def test_a_file_is_read_and_missing_keys_have_defaults(tmp_path: Path) -> None:
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
    ("text", "message"),
    [
        ("gpus = 4", "unknown key 'gpus'; there are bind, http_bind"),
        ("policy = 'fairest'", "policy: 'fairest' is not one of fair, gap-"),
        ("[[nodes]]\nname = 'a'\nspeed = 1\ngpus = 1", "unknown key 'nodes[0].speed'; docs"),
        ("[[nodes]]\nname = 'a'", "nodes[0]: object missing required field `gpus`"),
        (
            "nodes = [{name = 'a', gpus = 1}, {name = 'a', gpus = 2}]",
            "nodes: 'a' is listed twice",
        ),
        ("pipelines = 3", "pipelines: write each as a table [pipelines.NAME]"),
        ("[pipelines]\nmath = 1", "pipelines.math: expected `object`, got `int`"),
        ("[pipelines.math]\nworker = 1", "unknown key 'pipelines.math.worker'; did you"),
        ("[pipelines.math]\nweight = 0", "pipelines.math.weight: expected `float` >= 1e-06"),
        ("[pipelines.math]\nweight = nan", "pipelines.math.weight: expected `float` >= 1e-06"),
        ("[pipelines.math]\nweight = inf", "pipelines.math.weight: expected `float` <= 1000000"),
        (
            "bind = '127.0.0.1:7070'",
            "bind: '127.0.0.1:7070' is not an address; write it as tcp://HOST",
        ),
        ("bind = 'tcp://127.0.0.1:70707'", "bind: 'tcp://127.0.0.1:70707' is not an address"),
        ("bind = 7070", "bind: expected `str`, got `int`"),
        (
            "admission = 'tcp://h:1'",
            "admission: 'tcp://h:1' is not a path; admission serves",
        ),
        ("http_bind = ':7071'", "http_bind: ':7071' is not an address; write it as HOST:PORT"),
        ("http_bind = '127.0.0.1:*'", "http_bind: '127.0.0.1:*' is not an address"),
        ("journal = ' '", "journal: ' ' is not a folder name; give one"),
        ("fair = 3", "fair: expected `object`, got `int`"),
        ("service = []", "service: expected `object`, got `array`"),
        ("nodes = 3", "nodes: expected `array`, got `int`"),
        ("nodes = [{name = 'a b', gpus = 1}]", "nodes[0].name: a name is one word"),
        ("nodes = [{name = 'a', gpus = 0}]", "nodes[0].gpus: expected `int` >= 1"),
        ("nodes = [{name = 'a', gpus = 1_000_000}]", "nodes[0].gpus: expected `int` <= 1024"),
        ("nodes = [{name = 'a', gpus = 1, labels = ['']}]", "nodes[0].labels: a name is one word"),
        ("[pipelines.math]\nclusters = 2", "pipelines.math.clusters: expected `object`, got `int`"),
        ("[pipelines.math]\nclusters.b = 0", "pipelines.math.clusters.b: expected `int` >= 1"),
        ("[pipelines.math]\nclusters.b = []", "pipelines.math.clusters.b: expected `array` of len"),
        ("[pipelines.math]\nclusters.b = [0, 0]", "pipelines.math.clusters.b: a GPU is listed"),
        ("[pipelines.math]\nclusters.'b c' = 1", "pipelines.math.clusters.b c: a name is one word"),
        (
            "[pipelines.math]\ngeneration = [-1]",
            "pipelines.math.generation[0]: expected `int` >= 0",
        ),
        (
            "[pipelines.math]\ngeneration = [1, 1]",
            "pipelines.math.generation: a GPU is listed twice",
        ),
        (
            f"[pipelines.math]\nworkers = {10**30}",
            "pipelines.math.workers: expected `int` <= 1000000000",
        ),
        ("[pipelines.math]\nworkers = 1\ntp = 0", "pipelines.math.tp: expected `int` >= 1"),
        ("[pipelines.math]\nworkers = 1\nlabels = [1]", "pipelines.math.labels[0]: expected `str`"),
        ("[pipelines.math]\nworkers = 1\nlabels = ['']", "pipelines.math.labels: a name is one"),
        ("[pipelines.math]\nmax_gpus = -1", "pipelines.math.max_gpus: expected `int` >= 0"),
        ("[pipelines.math]\nmin_gpus = -1", "pipelines.math.min_gpus: expected `int` >= 0"),
        ("[pipelines.math]\npreemptible = 1", "pipelines.math.preemptible: expected `bool`"),
        (
            "[pipelines.math]\nrollouts_per_worker = -1",
            "pipelines.math.rollouts_per_worker: expected `int` >= 0",
        ),
        ("[pipelines.'a/b']\nworkers = 1", "pipelines.a/b: a name is one word"),
        ("[pipelines.math]", "pipelines.math.clusters: no GPUs requested"),
        (
            "[pipelines.math]\nworkers = 1\ngeneration = [0]",
            "pipelines.math.workers: `generation` already",
        ),
        (
            "[pipelines.math]\ngeneration = [0, 1, 2]\ntp = 2",
            "pipelines.math.generation: 3 GPUs is not",
        ),
        (
            "[pipelines.math]\nworkers = 1\ntp = 2\nmax_gpus = 1",
            "pipelines.math.max_gpus: 1 is less",
        ),
        ("[pipelines.math]\nworkers = 1\nmin_gpus = 2", "pipelines.math.min_gpus: 2 exceeds"),
        ("[pipelines.math]\nclusters.actor_infer = 1", "pipelines.math.clusters.actor_infer: use"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        fleet(text)
    assert str(caught.value).startswith(f"scheduler.toml: {message}")
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_refused_with_the_command_that_writes_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*; `rollmesh scheduler init` writes one"):
        read_fleet(tmp_path / "scheduler.toml")


def test_times_are_read_into_their_settings() -> None:
    assert convert_settings({"hold_s": 2.0}, FairSettings, "[fair]") == FairSettings(hold_s=2.0)
    with pytest.raises(ConfigError, match=r"\[fair\]: unknown key 'holds_s'; known keys: quan"):
        convert_settings({"holds_s": 2.0}, FairSettings, "[fair]")
    with pytest.raises(ConfigError, match=r"\[fair\]\.hold_s: nan is not a valid time"):
        convert_settings({"hold_s": math.nan}, FairSettings, "[fair]")
    with pytest.raises(ConfigError, match=r"\[fair\]\.hold_s: -1 is not a valid time; use 0 to "):
        convert_settings({"hold_s": -1}, FairSettings, "[fair]")


TIMES = [(kind, field.name) for kind in (FairSettings, SchedulerSettings) for field in fields(kind)]


@pytest.mark.parametrize(("kind", "key"), TIMES)
def test_an_invalid_time_is_refused_with_its_key_and_range(
    kind: type[FairSettings | SchedulerSettings], key: str
) -> None:
    least_s, most_s = RANGES.get(key, (0, 1e6))
    for good in (least_s, most_s, int(most_s)):
        assert getattr(convert_settings({key: good}, kind, "[x]"), key) == good
    nonsense: list[object] = ["1", True, [], {}]
    for bad in (least_s - 1e-6, -1, most_s + 1, math.inf, math.nan, *nonsense):
        with pytest.raises(ConfigError) as caught:
            convert_settings({key: bad}, kind, "[x]")
        message = f"[x].{key}: {bad!r} is not a valid time; use {least_s:g} to {most_s:.0f} seconds"
        assert str(caught.value) == message


@pytest.mark.parametrize(("name", "num"), [("eight", 8), ("two", 2)])
def test_the_example_fleets_are_read(name: str, num: int) -> None:
    path = Path(__file__).parents[4] / f"examples/fleet/{name}.toml"
    assert len(read_fleet(path).pipelines) == num
