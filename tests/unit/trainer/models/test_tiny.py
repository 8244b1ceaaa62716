"""The demo's model folder: any Hugging Face reader loads it, and chats render as Qwen3's do.

The warm start: consistent play in the mesh's own tokens, and nothing better.
"""

import itertools
import json
import math
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollmesh.envs.guess import GuessEnv
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer
from rollmesh.trainer.models.tiny import (
    GameTokens,
    TinyShape,
    WarmStartSettings,
    make_model,
    random_games,
    texts_of,
    train_tokenizer,
    write_model,
    write_tiny_model,
)

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


ENV = GuessEnv()


def prompts_of(folder: Path) -> tuple[Tokenizer, Prompts]:
    tokenizer = load_tokenizer(folder)
    return tokenizer, Prompts(choose_family(folder, "auto", tokenizer), tokenizer)


def test_random_games_use_the_hints_and_nothing_else() -> None:
    games = list(itertools.islice(random_games(ENV, random.Random(0)), 4000))
    first = Counter(game[0][0] for game in games)
    assert set(first) == set(range(1, 8))
    assert max(first.values()) - min(first.values()) < 150  # uniform: no first guess is preferred
    for game in games:
        lowest, highest = 1, 7
        for guess, answer in game:
            assert lowest <= guess <= highest
            lowest, highest = {
                "higher": (guess + 1, highest),
                "lower": (lowest, guess - 1),
                "": (lowest, highest),
            }[answer]
        assert 1 <= len(game) <= 3
        assert [answer == "" for _, answer in game] == [False] * (len(game) - 1) + [True]


def test_game_is_the_first_prompt_then_what_was_sampled_and_the_bridged_hints(
    tiny_folder: Path,
) -> None:
    tokenizer, prompts = prompts_of(tiny_folder)
    ids, is_sampled = GameTokens(ENV, tokenizer, prompts).tokens(((4, "higher"), (6, "")))
    assert tokenizer.decode(ids) == (
        "<|im_start|>user\nGuess my number from 1 to 7. You have 3 guesses.<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n<|im_start|>user\nhigher<|im_end|>\n"
        "<|im_start|>assistant\n6<|im_end|>"
    )
    sampled = [token for token, sampled in zip(ids, is_sampled, strict=True) if sampled]
    assert tokenizer.decode(sampled) == "4<|im_end|>6<|im_end|>"


def test_a_short_warm_start_teaches_the_format_first(tmp_path: Path) -> None:
    make_model(tmp_path, ENV, seed=0, settings=WarmStartSettings(num_steps=12, games_per_step=16))
    tokenizer, prompts = prompts_of(tmp_path)
    ids, is_sampled = GameTokens(ENV, tokenizer, prompts).tokens(((4, ""),))
    logits = AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([ids])).logits[0]
    chances = torch.softmax(logits.detach(), -1)
    answer = is_sampled.index(True)
    numbers = [tokenizer.encode(str(n))[0] for n in range(1, 8)]
    assert float(chances[answer - 1, numbers].sum()) > 0.5
    assert float(chances[answer, ids[-1]]) > 0.5


@pytest.mark.slow
def test_made_model_wins_about_two_games_in_three(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "tokenizer.json").write_text("of half a model")
    threads = torch.get_num_threads()
    write_model(tmp_path / "model", 0, "config.json")
    torch.set_num_threads(threads)
    assert 0.60 < success(tmp_path / "model") < 0.70


def success(folder: Path) -> float:
    """Return the exact probability to win: the sum over all games without a useless guess."""
    tokenizer, prompts = prompts_of(folder)
    tokens = GameTokens(ENV, tokenizer, prompts)
    model = AutoModelForCausalLM.from_pretrained(folder)

    def chances(history: tuple[tuple[int, str], ...]) -> list[float]:
        ids, is_sampled = tokens.tokens((*history, (1, "")))
        prompt = ids[: len(ids) - 1 - is_sampled[::-1].index(True) - 1]
        with torch.no_grad():
            logits = model(torch.tensor([prompt]), logits_to_keep=1).logits[0, -1]
        numbers = [tokenizer.encode(str(n))[0] for n in range(1, 8)]
        return torch.softmax(logits, -1)[numbers].tolist()

    def won(secret: int, history: tuple[tuple[int, str], ...]) -> float:
        if len(history) == ENV.num_guesses:
            return 0.0
        known.setdefault(history, chances(history))
        return math.fsum(
            chance * (1.0 if n == secret else won(secret, (*history, (n, ENV.hint(n, secret)))))
            for n, chance in enumerate(known[history], start=1)
        )

    known: dict[tuple[tuple[int, str], ...], list[float]] = {}
    return sum(won(secret, ()) for secret in range(1, 8)) / 7
