"""A model folder without weights: tokenizer, chat template and config, enough to serve chats.

- Nothing is downloaded and torch is not needed.
- The vocabulary has every byte, the special tokens of Qwen3's chat format, and the words that the
  test wants to be single tokens.
"""

import functools
import os
from collections.abc import Iterable
from pathlib import Path

import orjson
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)
from tokenizers.trainers import BpeTrainer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Pattern by which Qwen's tokenizers split text before BPE."""
MARKS = (
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
)
CHAT_TEMPLATE = (
    r"{%- if tools %}{{ '<|im_start|>tools\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    r"{%- for message in messages %}"
    r"{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    r"{%- for call in message.tool_calls or [] %}"
    r"{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}"
    r"{%- endfor %}{{ '<|im_end|>\n' }}"
    r"{%- endfor %}"
    r"{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A plain ChatML template; not Qwen3's."""


def write_model_folder(
    folder: Path,
    texts: Iterable[str] = (),
    model_type: str = "qwen3",
    chat_template: str = CHAT_TEMPLATE,
) -> Path:
    """Write a model folder to `folder` and return it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    _train(tokenizer, texts, 512)
    return _write_folder(folder, tokenizer, model_type, chat_template)


def write_large_folder(folder: Path, model_type: str = "qwen3") -> Path:
    """Write a folder whose tokenizer is built like Qwen's: its pattern, NFC, 16384 tokens of code.

    It is trained on this Python's standard library, so ids differ between Python versions.
    """
    return _write_folder(folder, Tokenizer.from_str(_large()), model_type, CHAT_TEMPLATE)


@functools.cache
def _large() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    split = pre_tokenizers.Split(Regex(QWEN_PATTERN), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    _train(tokenizer, library_texts(2_000_000), 16384)
    return str(tokenizer.to_str())


def library_texts(num_chars: int) -> list[str]:
    """Sources of the standard library, in order, until they have `num_chars`."""
    texts: list[str] = []
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        if sum(map(len, texts)) >= num_chars:
            break
        texts.append(path.read_text(errors="replace"))
    return texts


def _train(tokenizer: Tokenizer, texts: Iterable[str], vocab_size: int) -> None:
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    special = (*SPECIAL_TOKENS, *(VISION_TOKENS if vocab_size > 512 else ()))
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKS])


def _write_folder(folder: Path, tokenizer: Tokenizer, model_type: str, chat_template: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    end, start = (tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>"))
    _write(folder / "config.json", {"model_type": model_type, "eos_token_id": end})
    _write(folder / "generation_config.json", {"eos_token_id": [end, start]})
    settings: dict[str, object] = {"eos_token": "<|im_end|>", "chat_template": chat_template}
    _write(folder / "tokenizer_config.json", settings)
    return folder


def _write(path: Path, tree: dict[str, object]) -> None:
    path.write_bytes(orjson.dumps(tree))
