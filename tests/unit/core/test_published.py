"""What a run has published: the newest whole model, and the probe behind it."""

from pathlib import Path

import pytest

from rollmesh.core.published import (
    PROBE_FILE,
    Published,
    WeightsProbe,
    find_probe,
    leave_probe,
    newest_adapter,
    newest_published,
)

PROBE = WeightsProbe(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0), tolerance=0.1)


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_the_newest_whole_model_counts(tmp_path: Path) -> None:
    assert newest_published(tmp_path / "nothing") is None
    whole = ("config.json", "tokenizer.json", "model.safetensors")
    write(tmp_path / "v000002", *whole)
    ninth = write(tmp_path / "v000009", *whole)
    adapter = write(tmp_path / "v000010", "adapter_config.json", "adapter_model.safetensors")
    write(tmp_path / "v000011.part", *whole)
    write(tmp_path / "v000012", "adapter_config.json")
    assert newest_published(tmp_path) == Published(ninth, 9)
    assert newest_adapter(tmp_path) == Published(adapter, 10)


def test_a_probe_is_found_again_and_what_is_none_proves_nothing(tmp_path: Path) -> None:
    assert find_probe(tmp_path) is None
    leave_probe(tmp_path, PROBE)
    assert find_probe(tmp_path) == PROBE
    (tmp_path / PROBE_FILE).write_text("{")
    assert find_probe(tmp_path) is None


@pytest.mark.parametrize(
    ("logprobs", "why"),
    [
        ([-1.0, -2.0], ""),
        ([-1.05, -2.05], ""),
        ([-1.5, -2.5], "differ"),
        ([float("nan"), -2.0], "differ"),
        ([-1.0], "scored 1 tokens of 2"),
    ],
)
def test_scores_within_the_tolerance_are_of_the_same_weights(
    logprobs: list[float], why: str
) -> None:
    told = PROBE.why_not(logprobs)
    assert why in told
    assert bool(told) == bool(why)
