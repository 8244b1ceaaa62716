"""A model folder without weights: tokenizer, chat template and config, enough to serve chats from.

Invariant: nothing is downloaded and no torch is needed; the vocabulary has every byte, the marks of
Qwen3's chat format, and whatever words the test wants to be single tokens. Driven by tests and
benchmarks.
"""

from collections.abc import Iterable
from pathlib import Path

import orjson
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
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
    """Fill `folder`; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=512, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKS])
    tokenizer.save(str(folder / "tokenizer.json"))
    end, start = (tokenizer.token_to_id(text) for text in ("<|im_end|>", "<|endoftext|>"))
    _write(folder / "config.json", {"model_type": model_type, "eos_token_id": end})
    _write(folder / "generation_config.json", {"eos_token_id": [end, start]})
    settings: dict[str, object] = {"eos_token": "<|im_end|>", "chat_template": chat_template}
    _write(folder / "tokenizer_config.json", settings)
    return folder


def _write(path: Path, tree: dict[str, object]) -> None:
    path.write_bytes(orjson.dumps(tree))
