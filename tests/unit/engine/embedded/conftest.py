"""Fixtures of the embedded engine's tests: tiny models, made once for each run."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rollmesh.engine.embedded.model import Model
from tests.unit.engine.embedded.tiny_models import EOS, VOCAB_SIZE, write_model


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """Run torch on one thread: tiny tensors are slower on many, and tests share the machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3."""
    return write_model(tmp_path_factory.mktemp("models") / "qwen3-seed0", "qwen3", seed=0)


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same architecture with other weights."""
    return write_model(tmp_path_factory.mktemp("models") / "qwen3-seed1", "qwen3", seed=1)


@pytest.fixture(scope="session")
def model(folder: Path) -> Model:
    """The tiny Qwen3, loaded."""
    return Model(folder, torch.float32)


@pytest.fixture(scope="session")
def other_model(other_folder: Path) -> Model:
    """Other weights, loaded."""
    return Model(other_folder, torch.float32)


@pytest.fixture(scope="session")
def letters() -> Tokenizer:
    """A tokenizer of the tiny models' vocabulary: one character for each id, ASCII first."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())[: VOCAB_SIZE - 1]
    letters.insert(EOS, "<end>")
    tokenizer = Tokenizer(models.BPE({letter: at for at, letter in enumerate(letters)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
