"""What tiktoken encodes is what the library tokenizers would have encoded, or it is not used."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.runtime.tokenizer import MAX_CHARS, Tokenizer, load_tokenizer
from rollmesh.testing.model_folder import MARKS, SPECIAL_TOKENS, library_texts

LOOK_ALIKES = ["<|im_start|", "<think", "<|im_end|> ", "</tool_call>\n", "<", "|>", "<|im_end|>>"]


@pytest.fixture(scope="module")
def library(large_folder: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(large_folder / "tokenizer.json"))


@pytest.fixture(scope="module")
def large(large_folder: Path) -> Tokenizer:
    tokenizer = load_tokenizer(large_folder)
    assert tokenizer.is_fast
    return tokenizer


@given(
    parts=st.lists(
        st.text(max_size=30)
        | st.sampled_from([*SPECIAL_TOKENS, *MARKS, *LOOK_ALIKES, "e\u0301", "\u0338", "\u212b"]),
        max_size=8,
    )
)
def test_any_text_is_encoded_as_the_library_does(
    large: Tokenizer, library: tokenizers.Tokenizer, parts: list[str]
) -> None:
    text = "".join(parts)
    assert large.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_code_is_encoded_as_the_library_does(
    large: Tokenizer, library: tokenizers.Tokenizer
) -> None:
    for text in library_texts(2_500_000)[-8:]:
        assert large.encode(text) == library.encode(text, add_special_tokens=False).ids


def test_a_million_blanks_are_encoded_too(large: Tokenizer) -> None:
    assert large.decode(large.encode(" " * 1_000_000)) == " " * 1_000_000
    assert large.decode(large.encode(" " * MAX_CHARS)) == " " * MAX_CHARS


def other_pattern(spec: dict[str, Any]) -> None:
    spec["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+|\s+(?!\S)|[^\p{L}]"


def marks_in_composed_text(spec: dict[str, Any]) -> None:
    for token in spec["added_tokens"]:
        token["normalized"] = not token["special"]


def lower_case(spec: dict[str, Any]) -> None:
    spec["normalizer"] = {"type": "Lowercase"}


def other_order(spec: dict[str, Any]) -> None:
    spec["model"]["merges"].reverse()


def spaces_before_marks(spec: dict[str, Any]) -> None:
    spec["added_tokens"][-1]["lstrip"] = True


def one_merge_less(spec: dict[str, Any]) -> None:
    """The vocabulary keeps its token, which tiktoken would still make."""
    del spec["model"]["merges"][16000]


@pytest.mark.parametrize(
    ("change", "stays_fast"),
    [
        (other_pattern, True),
        (marks_in_composed_text, True),
        (lower_case, False),
        (other_order, False),
        (spaces_before_marks, False),
        (one_merge_less, False),
    ],
)
def test_a_tokenizer_that_differs_is_left_to_the_library(
    large_folder: Path, change: Callable[[dict[str, Any]], None], stays_fast: bool
) -> None:
    spec = orjson.loads((large_folder / "tokenizer.json").read_bytes())
    change(spec)
    library = tokenizers.Tokenizer.from_str(orjson.dumps(spec).decode())
    tokenizer = Tokenizer(library)
    assert tokenizer.is_fast is stays_fast
    text = (
        "Import <think>\u0338 os; a  b </tool_call>the <|im_end|>\u0338 self.assertEqual(x)\n" * 3
    )
    assert tokenizer.encode(text) == library.encode(text, add_special_tokens=False).ids
