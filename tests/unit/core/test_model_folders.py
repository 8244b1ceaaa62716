"""A Hub id means its cached snapshot, and the newest complete published weights are found."""

from pathlib import Path

import pytest

from rollmesh.core.model_folders import (
    PROBE_FILE,
    PublishedWeights,
    WeightsProbe,
    find_probe,
    leave_probe,
    newest_adapter,
    newest_published,
    resolve_model,
    why_no_folder,
    why_no_model,
)


@pytest.fixture
def snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete cached snapshot of Qwen/Qwen3-0.6B."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache/models--Qwen--Qwen3-0.6B"
    snapshot = repository / "snapshots/abc"
    for path in (snapshot, repository / "refs"):
        path.mkdir(parents=True)
    (repository / "refs/main").write_text("abc")
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (snapshot / name).touch()
    return snapshot


def test_a_hub_id_is_its_cached_snapshot(snapshot: Path) -> None:
    assert resolve_model("Qwen/Qwen3-0.6B") == str(snapshot)
    assert why_no_model(str(snapshot)) == ""


def test_the_cache_is_found_by_hf_home(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(snapshot.parents[3]))
    (snapshot.parents[3] / "hub").symlink_to(snapshot.parents[2])
    assert resolve_model("Qwen/Qwen3-0.6B").endswith("/snapshots/abc")


def test_a_folder_of_that_name_comes_first(snapshot: Path, tmp_path: Path) -> None:
    (tmp_path / "Qwen/Qwen3-0.6B").mkdir(parents=True)
    assert snapshot.is_dir()
    assert resolve_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"


@pytest.mark.usefixtures("snapshot")
def test_a_hub_id_that_is_not_cached_names_the_download() -> None:
    assert resolve_model("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"
    assert why_no_folder("Qwen/Qwen3-8B").endswith("hf download Qwen/Qwen3-8B")
    assert why_no_model("Qwen/Qwen3-8B").endswith("hf download Qwen/Qwen3-8B")


def test_a_snapshot_without_weights_names_the_download(snapshot: Path) -> None:
    (snapshot / "model.safetensors").unlink()
    assert why_no_model(str(snapshot)) == (
        "not a model folder: it has no *.safetensors; "
        "complete the download: hf download Qwen/Qwen3-0.6B"
    )


@pytest.mark.parametrize("path", ["nowhere", "/no/where", "./a/b", "a/b/c"])
def test_a_path_is_not_a_hub_id(path: str) -> None:
    assert resolve_model(path) == path
    assert why_no_folder(path).startswith("no such folder; name one in Hugging Face layout")


PROBE = WeightsProbe(token_ids=(1, 2, 3), logprobs=(-1.0, -2.0), tolerance=0.1)


def write(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True)
    for name in names:
        (folder / name).touch()
    return folder


def test_the_newest_complete_model_is_found(tmp_path: Path) -> None:
    assert newest_published(tmp_path / "nothing") is None
    whole = ("config.json", "tokenizer.json", "model.safetensors")
    write(tmp_path / "v000002", *whole)
    ninth = write(tmp_path / "v000009", *whole)
    adapter = write(tmp_path / "v000010", "adapter_config.json", "adapter_model.safetensors")
    write(tmp_path / "v000011.part", *whole)
    write(tmp_path / "v000012", "adapter_config.json")
    assert newest_published(tmp_path) == PublishedWeights(ninth, 9)
    assert newest_adapter(tmp_path) == PublishedWeights(adapter, 10)


def test_a_written_probe_is_read_back_and_a_damaged_one_is_ignored(tmp_path: Path) -> None:
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
    reason = PROBE.why_not(logprobs)
    assert why in reason
    assert bool(reason) == bool(why)
