"""Makes the demo's model folder: a tiny Qwen3-shaped model, random weights, a tokenizer of its own.

Invariant: the folder is a Hugging Face one like any other (stock transformers loads model and
tokenizer from it, offline), and its chat template renders what the library `renderers` renders
for Qwen3, token for token. Nothing is downloaded; the same seed makes the same bytes. Driven by
the warm start, once per demo, and by tests.
"""

from collections.abc import Iterable
from pathlib import Path

import msgspec
import orjson
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.trainers import BpeTrainer
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils.logging import disable_progress_bar

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP_TOKENS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
"""Single tokens in Qwen3's vocabulary too, but part of the text that a decoder shows."""

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen's tokenizers cut text before BPE (tokenizer.json of Qwen/Qwen3-0.6B)."""


class TinyShape(msgspec.Struct, frozen=True, kw_only=True):
    """The size of the model; the defaults make about 100,000 parameters."""

    width: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 2
    head_dim: int = 32
    mlp_width: int = 128
    max_vocab: int = 384
    """At most so many tokens; the tokenizer may need fewer, and the model has as many as it."""
    max_positions: int = 1024
    init_std: float = 0.2
    """Of the random weights; Qwen3's own 0.02 is for wide models and learns slowly here."""


def write_tiny_model(
    folder: Path, texts: Iterable[str], shape: TinyShape, seed: int
) -> Qwen3ForCausalLM:
    """Fill `folder` with a tokenizer that knows `texts` well and a model that knows nothing.

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
    """A byte-level BPE tokenizer with Qwen3's pre-tokenizer and special tokens.

    At most `max_vocab` tokens; any text encodes, since the 256 bytes are all in the vocabulary.
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
    """The model with random weights drawn from `seed`; torch's global generator stays as it was."""
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
