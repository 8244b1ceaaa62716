"""The device that trains, and warnings if it or the learning rate does not fit the model."""

import pytest
import torch

from rollmesh.core.config import Config, EngineConfig, TrainerConfig
from rollmesh.core.errors import ConfigError
from rollmesh.trainer.process import settings_warnings
from rollmesh.trainer.ranks import resolve_device


def test_what_is_there_is_given() -> None:
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "is_there", "line"),
    [
        ("cuda", False, 'device = "cuda": torch finds no GPU'),
        ("cuda:1", False, 'device = "cuda:1": torch finds no GPU'),
        ("gpu", True, 'device = "gpu": Expected one of cpu, cuda'),
        ("", True, 'device = "": '),
    ],
)
def test_what_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, is_there: bool, line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    with pytest.raises(ConfigError) as caught:
        resolve_device(name)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("num_gpus", "num_ranks", "device"),
    [(0, 1, "cpu"), (1, 1, "cuda"), (1, 2, "cpu"), (2, 2, "cuda")],
)
def test_auto_is_cuda_where_each_rank_has_a_gpu(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, num_ranks: int, device: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert TrainerConfig().device == "auto"
    assert resolve_device("auto", num_ranks) == torch.device(device)


def warned(num_parameters: int, device: str, **trainer: object) -> list[str]:
    """Events of the warnings for a model of this size."""
    config = Config(
        trainer=TrainerConfig(**trainer),  # type: ignore[arg-type] # spelled out by the tests
        engine=EngineConfig(urls=("http://a",)),
    )
    return [each.event for each in settings_warnings(config, torch.device(device), num_parameters)]


def test_a_large_model_with_a_high_learning_rate_is_warned_about() -> None:
    assert warned(100_000_000, "cuda", learning_rate=1e-4) == ["trainer.high_rate"]
    assert warned(99_000_000, "cuda", learning_rate=1e-3) == []
    assert warned(100_000_000, "cuda", learning_rate=9e-5) == []
    assert warned(100_000_000, "cuda", learning_rate=1e-3, lora_rank=8) == []
    assert warned(10**9, "cuda") == [], "the default rate suits a pretrained model"


def test_a_large_model_on_a_cpu_is_warned_about() -> None:
    assert warned(10**9, "cpu") == ["trainer.on_cpu"]
    assert warned(10**5, "cpu") == []
    embedded = settings_warnings(Config(), torch.device("cuda"), 10**9)
    assert [each.event for each in embedded] == ["engine.on_cpu"]
    assert "engine.urls" in embedded[0].fix
