"""The demo's model: a tiny Qwen3-shaped one with its own tokenizer, and its warm start.

    secret, uniform guesses among those that the hints still allow  ->  the game's exact tokens
    ->  cross entropy on the player's tokens  ->  a policy that wins about two games in three

- The folder is a normal Hugging Face folder (stock transformers loads model and tokenizer offline),
  and its chat template renders what the library `renderers` renders for Qwen3, token for token.
- Nothing is downloaded; the same seed gives the same bytes.
- The warm start knows no good move: every guess is uniform over what is possible, so anything that
  training adds comes from rewards. Its tokens are those of the mesh: the first prompt is rendered,
  each next one is the sampled tokens plus the delta of the new message.

Shapes: B games, T tokens, N predicted tokens, V vocabulary.
"""

import random
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import orjson
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

from rollmesh.envs.guess import GuessEnv
from rollmesh.runtime.chat import read_message
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Chat, Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer as ChatTokenizer
from rollmesh.runtime.tokens.tokenizer import load_tokenizer
from rollmesh.trainer.models.folders import drop_empty_cache

drop_empty_cache()

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Single tokens in Qwen3's vocabulary too, but part of the text that a decoder returns."""

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern by which Qwen's tokenizers split text before BPE (tokenizer.json of Qwen/Qwen3-0.6B)."""


class TinyShape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the model; the defaults make about 100,000 parameters."""

    width: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_width: int = 128
    max_vocab: int = 384
    """Largest vocabulary; the tokenizer may need less, and the model has the tokenizer's size."""
    max_positions: int = 1024
    init_std: float = 0.2
    """Deviation of the random weights; Qwen3's 0.02 suits wide models, but learns slowly here."""


def write_tiny_model(
    folder: Path, texts: Iterable[str], shape: TinyShape, seed: int
) -> Qwen3ForCausalLM:
    """Write a tokenizer that was trained on `texts` and a model with random weights into `folder`.

    The same arguments give the same files; existing ones are overwritten. Returns the model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(texts, shape.max_vocab)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_bytes(_tokenizer_config(shape.max_positions))
    disable_progress_bar()
    model = new_model(shape, tokenizer, seed)
    model.save_pretrained(folder)
    return model


def train_tokenizer(texts: Iterable[str], max_vocab: int) -> Tokenizer:
    """Train a byte-level BPE tokenizer with Qwen3's pre-tokenizer and special tokens.

    It has at most `max_vocab` tokens. Any text can be encoded: all 256 bytes are in the vocabulary.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=max_vocab - len(SPECIAL_TOKENS) - len(MARKUP_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKUP_TOKENS])
    return tokenizer


def new_model(shape: TinyShape, tokenizer: Tokenizer, seed: int) -> Qwen3ForCausalLM:
    """Return a model with random weights of `seed`; torch's global generator is unchanged."""
    end_of_turn = tokenizer.token_to_id("<|im_end|>")
    end_of_text = tokenizer.token_to_id("<|endoftext|>")
    config = Qwen3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=shape.width,
        intermediate_size=shape.mlp_width,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_positions,
        initializer_range=shape.init_std,
        tie_word_embeddings=True,
        eos_token_id=end_of_turn,
        pad_token_id=end_of_text,
        bos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config.eos_token_id = [end_of_turn, end_of_text]
    model.generation_config.pad_token_id = end_of_text
    return model


def _tokenizer_config(max_positions: int) -> bytes:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_positions,
        "chat_template": Path(__file__).with_name("tiny_chat.jinja").read_text(),
    }
    return orjson.dumps(config, option=orjson.OPT_INDENT_2)


Game = tuple[tuple[int, str], ...]
"""(guess, answer) of each turn; the last answer is empty."""


class WarmStartSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Length and rates of the warm start; with the defaults about 65 % of games are won."""

    num_steps: int = 90
    games_per_step: int = 64
    matrix_rate: float = 0.03
    """Muon's learning rate, for the weight matrices of the layers."""
    other_rate: float = 4e-3
    """AdamW's, for embeddings and norms."""
    last_rate: float = 0.1
    """Share of their start to which both rates fall, linearly."""
    end_weight: float = 0.1
    """Weight of an end of turn in the loss; it is half of all tokens and learned at once."""


class GameTokens:
    """Games as the exact tokens of the mesh; each text is rendered once."""

    def __init__(self, env: GuessEnv, tokenizer: ChatTokenizer, prompts: Prompts) -> None:
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._opening = list(prompts.first(_chat_of(env.opening())))
        self.end_id = prompts.stop_token_ids[0]
        self._deltas: dict[str, list[int]] = {}

    def tokens(self, game: Game) -> tuple[list[int], list[bool]]:
        """Return the token ids of `game`, and which of them the player sampled."""
        ids, is_sampled = list(self._opening), [False] * len(self._opening)
        for guess, answer in game:
            sampled_ids = [*self._tokenizer.encode(str(guess)), self.end_id]
            delta = self._delta(sampled_ids, answer) if answer else []
            ids += sampled_ids + delta
            is_sampled += [True] * len(sampled_ids) + [False] * len(delta)
        return ids, is_sampled

    def _delta(self, sampled_ids: list[int], answer: str) -> list[int]:
        if answer not in self._deltas:
            delta = self._prompts.extend(sampled_ids, _chat_of(answer))
            assert delta is not None, "the demo's own template can always be extended"
            self._deltas[answer] = list(delta)
        return self._deltas[answer]


def write_model(folder: Path, seed: int, last_file: str) -> None:
    """Write the demo's model into `folder`, with `last_file` last: if it exists, all files do.

    Sets torch's number of threads to one.
    """
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".", dir=folder) as name:
        new = Path(name)
        make_model(new, GuessEnv(), seed)
        for file in sorted(new.iterdir(), key=lambda file: file.name == last_file):
            file.replace(folder / file.name)


def make_model(
    folder: Path, env: GuessEnv, seed: int, settings: WarmStartSettings | None = None
) -> None:
    """Write a warm-started tiny model for `env`; the same seed gives the same weights."""
    model = write_tiny_model(folder, texts_of(env), TinyShape(), seed)
    tokenizer = load_tokenizer(folder)
    prompts = Prompts(choose_family(folder, "auto", tokenizer), tokenizer)
    games = random_games(env, random.Random(seed))
    warm_start(model, games, GameTokens(env, tokenizer, prompts), settings or WarmStartSettings())
    model.save_pretrained(folder)


def texts_of(env: GuessEnv) -> list[str]:
    """The texts of the game in their chat markup, to train the tokenizer."""
    hints = [env.hint(None, 1), env.hint(1, 1), env.hint(1, 2), env.hint(2, 1)]
    roles = [f"{role}\n" for role in ("system", "user", "assistant")]
    return [env.opening(), *hints, *roles]


def random_games(env: GuessEnv, rng: random.Random) -> Iterator[Game]:
    """Yield endless games whose guesses are uniform over what the hints still allow."""
    while True:
        secret = rng.randint(1, env.highest)
        lowest, highest = 1, env.highest
        game: list[tuple[int, str]] = []
        while len(game) < env.num_guesses and (not game or game[-1][0] != secret):
            guess = rng.randint(lowest, highest)
            game.append((guess, env.hint(guess, secret)))
            if guess < secret:
                lowest = guess + 1
            else:
                highest = guess - 1
        yield (*game[:-1], (game[-1][0], ""))


def warm_start(
    model: Qwen3ForCausalLM, games: Iterator[Game], tokens: GameTokens, settings: WarmStartSettings
) -> None:
    """Train `model` on fresh games each step, in place.

    Muon (Jordan et al. 2024, "Muon: an optimizer for hidden layers") learns the hints in a third
    of the steps that AdamW takes.
    """
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, lr=settings.matrix_rate, momentum=0.9, weight_decay=0.0),
        torch.optim.AdamW(others, lr=settings.other_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    schedules = [
        torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, settings.last_rate, settings.num_steps)
        for optimizer in optimizers
    ]
    for _ in range(settings.num_steps):
        counts = Counter(next(games) for _ in range(settings.games_per_step))
        loss = _loss(model, counts, tokens, settings.end_weight)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        model.zero_grad()


def _loss(
    model: Qwen3ForCausalLM, counts: Counter[Game], tokens: GameTokens, end_weight: float
) -> Tensor:
    """Mean cross entropy of the players' tokens; equal games are computed once, with a weight."""
    rows = [tokens.tokens(game) for game in counts]
    length = max(len(ids) for ids, _ in rows)
    ids_BT = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])
    # Padding is on the right, which causal attention does not read: no mask is needed.
    weights_BT = torch.tensor(
        [
            [num * float(sampled) for sampled in is_sampled] + [0.0] * (length - len(is_sampled))
            for (_, is_sampled), num in zip(rows, counts.values(), strict=True)
        ]
    )
    predicted_BT = weights_BT[:, 1:] > 0
    hidden_BTD = model.model(ids_BT[:, :-1], use_cache=False).last_hidden_state
    logits_NV = model.lm_head(hidden_BTD[predicted_BT])
    targets_N = ids_BT[:, 1:][predicted_BT]
    weights_N = weights_BT[:, 1:][predicted_BT]
    weights_N = weights_N * torch.where(targets_N == tokens.end_id, end_weight, 1.0)
    losses_N = cross_entropy(logits_NV, targets_N, reduction="none")
    return (losses_N * weights_N).sum() / weights_N.sum()


def _chat_of(text: str) -> Chat:
    """A chat of one user message."""
    raw = orjson.dumps({"role": "user", "content": text})
    return Chat([raw], [read_message(raw, 0)])
