"""Token ids and text, whole and in pieces; tiktoken is used only if it equals the library."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.core.errors import ModelError
from rollmesh.runtime.tokens.tokenizer import MAX_CHARS, Tokenizer, load_tokenizer
from rollmesh.testing.model_folder import MARKS, SPECIAL_TOKENS, library_texts, write_model_folder

TEXT = "hello world \u00e9\u4f60 \U0001f642<|im_end|><think>x</think>"


def test_decoding_equals_the_librarys(model_folder: Path, tokenizer: Tokenizer) -> None:
    library = tokenizers.Tokenizer.from_file(str(model_folder / "tokenizer.json"))
    ids = tokenizer.encode(TEXT)
    assert ids == library.encode(TEXT, add_special_tokens=False).ids
    assert tokenizer.decode(ids) == TEXT == library.decode(ids, skip_special_tokens=False)


def test_a_short_text_is_encoded_the_same_each_time(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode("user\n")
    first.append(0)
    assert tokenizer.encode("user\n") == first[:-1]


def test_unknown_ids_are_decoded_to_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([tokenizer.vocab_size + 7]) == ""


@given(text=st.text(max_size=40), cuts=st.lists(st.integers(0, 200), max_size=6))
def test_pieces_join_to_the_whole_text_wherever_they_are_split(
    tokenizer: Tokenizer, text: str, cuts: list[int]
) -> None:
    ids = tokenizer.encode(text)
    stream = tokenizer.stream()
    bounds = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    pieces = [stream.feed(ids[a:b]) for a, b in pairwise(bounds)]
    assert "".join(pieces) + stream.end() == tokenizer.decode(ids)


def test_a_character_is_never_split(tokenizer: Tokenizer) -> None:
    stream = tokenizer.stream()
    pieces = [stream.feed([i]) for i in tokenizer.encode("\u4f60")]
    assert [p for p in pieces if p] == ["\u4f60"]
    broken = tokenizer.stream()
    assert broken.feed(tokenizer.encode("\u4f60")[:1]) == ""
    assert broken.end() == "\ufffd"


def test_the_vocabulary_size_is_the_models_if_that_is_larger(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    assert load_tokenizer(folder).vocab_size < 4096
    (folder / "config.json").write_text('{"vocab_size": 4096}')
    assert load_tokenizer(folder).vocab_size == 4096
    (folder / "config.json").write_text('{"text_config": {"vocab_size": 5000}}')
    assert load_tokenizer(folder).vocab_size == 5000


def test_other_kinds_of_tokenizers_stream_through_the_library() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode([0, 1]) == "a b"
    assert tokenizer.stream().feed([0, 1]).split() == ["a", "b"]


def test_a_folder_without_a_tokenizer_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer\.json in it; model\.path"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer\.json: not a tokenizer"):
        load_tokenizer(tmp_path)


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


def test_a_million_blanks_are_encoded(large: Tokenizer) -> None:
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
    """Remove a merge whose token stays in the vocabulary; tiktoken would still produce that
    token."""
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
