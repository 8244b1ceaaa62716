"""The warm start: it shows consistent play, in the mesh's own tokens, and nothing better."""

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rollmesh.envs.guess import GuessEnv
from rollmesh.runtime.families import choose_family
from rollmesh.runtime.prompts import Prompts
from rollmesh.runtime.tokenizer import Tokenizer, load_tokenizer
from rollmesh.trainer.models.tiny import (
    GameTokens,
    WarmStartSettings,
    make_model,
    random_games,
    write_model,
)

ENV = GuessEnv()


def prompts_of(folder: Path) -> tuple[Tokenizer, Prompts]:
    tokenizer = load_tokenizer(folder)
    return tokenizer, Prompts(choose_family(folder, "auto", tokenizer), tokenizer)


def test_random_games_keep_to_the_hints_and_know_no_better() -> None:
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


def test_lesson_teaches_the_format_first(tmp_path: Path) -> None:
    make_model(tmp_path, ENV, seed=0, lesson=WarmStartSettings(num_steps=12, games_per_step=16))
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
    """The chance to win, exactly: the sum over all games without a useless guess."""
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
