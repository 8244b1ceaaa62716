"""Turns sampled token ids back into the pieces of text that people read.

Owns the run's tokenizer (the Rust library alone: no torch, no transformers). Invariant: the pieces
joined are the decoded text, one piece per id; a character made of several tokens stands at the
last of them. Without a tokenizer the ids themselves are shown. Driven by `pages`.
"""

from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream


class TokenText:
    """Text pieces of one run's token ids."""

    def __init__(self, folders: list[Path]) -> None:
        """Take tokenizer.json from the first of `folders` that has one."""
        files = [folder / "tokenizer.json" for folder in folders]
        self._tokenizer = next((load(file) for file in files if file.is_file()), None)

    def pieces(self, token_ids: list[int]) -> list[str]:
        """One piece of text per id."""
        if self._tokenizer is None:
            return [f"<{token_id}>" for token_id in token_ids]
        stream = DecodeStream(skip_special_tokens=False)
        return [stream.step(self._tokenizer, token_id) or "" for token_id in token_ids]


def load(file: Path) -> Tokenizer | None:
    """The tokenizer of `file`, None if it is broken."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - door: the library raises nothing narrower
        return None
