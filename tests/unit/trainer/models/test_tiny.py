"""The demo's model folder: any Hugging Face reader takes it, and chats render as Qwen3's do."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollmesh.envs.guess import GuessEnv
from rollmesh.runtime.families import choose_family
from rollmesh.runtime.tokenizer import load_tokenizer
from rollmesh.trainer.models.tiny import TinyShape, texts_of, train_tokenizer, write_tiny_model

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
CALL = {"type": "function", "function": {"name": "look", "arguments": '{"at": 3}'}}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one question": [{"role": "user", "content": "Guess my number."}],
    "a game": [
        {"role": "user", "content": "Guess my number."},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "higher"},
        {"role": "assistant", "content": "6"},
        {"role": "user", "content": "lower"},
    ],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi\n"}],
    "answered": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}],
    "late system": [{"role": "user", "content": "hi"}, {"role": "system", "content": "stop"}],
    "reasoned": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", "reasoning_content": "they greet"},
    ],
    "reasoning in the text": [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "<think>\nthey greet\n</think>\n\nho"},
        {"role": "user", "content": "more"},
    ],
    "tools": [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": "so:", "tool_calls": [CALL, CALL]},
        {"role": "tool", "content": "nothing"},
        {"role": "tool", "content": "a door"},
    ],
}


@pytest.mark.parametrize("generates", [True, False])
@pytest.mark.parametrize("chat", CHATS.values(), ids=CHATS)
@pytest.mark.parametrize("tools", [None, [TOOL]], ids=["plain", "with tools"])
def test_template_renders_what_the_qwen3_renderer_renders(
    tiny_folder: Path, chat: list[dict[str, Any]], tools: list[Any] | None, generates: bool
) -> None:
    template = AutoTokenizer.from_pretrained(tiny_folder)
    renderer = choose_family(tiny_folder, "qwen3", load_tokenizer(tiny_folder)).renderer
    text = template.apply_chat_template(
        chat, tools=tools, add_generation_prompt=generates, tokenize=False
    )
    ids = template.encode(text, add_special_tokens=False)
    expected = renderer.render_ids(chat, tools=tools, add_generation_prompt=generates)
    assert text == template.decode(expected)
    assert ids == expected


def test_stock_transformers_loads_model_and_tokenizer(tiny_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert model.config.vocab_size == len(tokenizer)
    assert 90_000 < sum(p.numel() for p in model.parameters()) < 120_000
    stops = [tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")]
    assert model.generation_config.eos_token_id == stops
    assert tokenizer.eos_token == "<|im_end|>"
    logits = model(torch.tensor([tokenizer.encode("Guess my number")])).logits
    assert logits.shape == (1, 3, len(tokenizer))


def test_folder_names_its_architecture(tiny_folder: Path) -> None:
    config = json.loads((tiny_folder / "config.json").read_text())
    assert (config["model_type"], config["head_dim"]) == ("qwen3", 32)


def test_words_of_the_game_are_single_tokens(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    for word in ("higher", "lower", "correct", "Guess", " guesses", "assistant", "user", "7"):
        assert len(tokenizer.encode(word)) == 1


def test_any_text_survives_the_tokenizer(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(tiny_folder)
    text = "0 1 10 caf\u00e9 \u4e2d\u6587 \U0001f600\t\r\n  <|im_end|></think>"
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_vocabulary_stays_within_its_bound() -> None:
    words = ["".join(letters) for letters in itertools.permutations("abcde")]
    assert train_tokenizer(words, 300).get_vocab_size() == 300


def test_same_seed_makes_the_same_files_and_another_does_not(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_tiny_model(tmp_path / name, texts_of(GuessEnv()), TinyShape(), seed)
    assert torch.equal(torch.random.get_rng_state(), state)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    for name in files:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    weights = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("a", "c")]
    assert weights[0] != weights[1]
