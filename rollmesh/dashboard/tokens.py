"""Decodes sampled token ids into pieces of text.

- The tokenizer is the Rust library alone, without torch or transformers.
- The pieces joined are the decoded text, one piece per id. A character made of several tokens is
  in the piece of the last of them.
- An id that is none of the tokenizer's is shown as an empty piece. Without a tokenizer the ids are
  shown as numbers.
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
        return [
            (stream.step(self._tokenizer, token_id) or "") if 0 <= token_id < 2**32 else ""
            for token_id in token_ids
        ]


def load(file: Path) -> Tokenizer | None:
    """The tokenizer of `file`, None if it is broken."""
    try:
        return Tokenizer.from_file(str(file))
    except Exception:  # noqa: BLE001 - door: the library raises nothing narrower
        return None
