"""One model folder and its prompts, shared by all tests of the runtime."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rollmesh.runtime.tokens.families import Family, choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer
from rollmesh.testing.model_folder import write_large_folder, write_model_folder

TEXTS = ["system user assistant guess a number higher lower correct I guess hello world"] * 4


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"), TEXTS)


@pytest.fixture(scope="session")
def large_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_large_folder(tmp_path_factory.mktemp("large"))


@pytest.fixture(scope="session")
def tokenizer(model_folder: Path) -> Tokenizer:
    return load_tokenizer(model_folder)


@pytest.fixture(scope="session")
def family(model_folder: Path, tokenizer: Tokenizer) -> Family:
    return choose_family(model_folder, "auto", tokenizer)


@pytest.fixture(scope="session")
def prompts(family: Family, tokenizer: Tokenizer) -> Prompts:
    return Prompts(family, tokenizer)


@pytest.fixture(scope="session")
def template_prompts(model_folder: Path, tokenizer: Tokenizer) -> Prompts:
    return Prompts(choose_family(model_folder, "template", tokenizer), tokenizer)


@pytest.fixture
def reply_ids(tokenizer: Tokenizer) -> Callable[[str], Sequence[int]]:
    """Return the token ids of a finished turn with this text."""
    return lambda text: tokenizer.encode(text + "<|im_end|>")
