"""A device that is not there is said in one line."""

import pytest
import torch

from rollmesh.core.errors import ConfigError
from rollmesh.trainer.learning.device import device_of


def test_what_is_there_is_given() -> None:
    assert device_of("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "is_there", "line"),
    [
        ("cuda", False, 'device = "cuda": torch sees no GPU here'),
        ("cuda:1", False, 'device = "cuda:1": torch sees no GPU here'),
        ("gpu", True, 'device = "gpu": Expected one of cpu, cuda'),
        ("", True, 'device = "": '),
    ],
)
def test_what_is_not_there_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, is_there: bool, line: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_there)
    with pytest.raises(ConfigError) as caught:
        device_of(name)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)
