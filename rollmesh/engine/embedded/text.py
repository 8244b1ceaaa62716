"""Text beside the tokens, where the model folder has a tokenizer; the mesh itself reads only ids.

Invariant: text never ends in half a character: bytes that are not yet a whole one wait for the next
token. Driven by the routes.
"""

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer.json, or None if it has none."""
    path = folder / "tokenizer.json"
    return Tokenizer.from_file(str(path)) if path.exists() else None


class TextTail:
    """Decodes a growing list of ids piece by piece.

    Each piece is the difference of two decodings of the last few ids, as tokenizers may join or
    strip at a text's beginning (the method of Hugging Face's text-generation-inference).
    """

    def __init__(self, tokenizer: Tokenizer, skips_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skips_special = skips_special
        self._window: list[int] = []
        self._num_read = 0
        """Ids of the window whose text is out."""
        self.text = ""
        """All that came out so far."""

    def feed(self, ids: Sequence[int], *, is_last: bool) -> str:
        """The text that `ids` add; half a character waits, unless `ids` are the last."""
        self._window.extend(ids)
        before = self._decode(self._window[: self._num_read])
        after = self._decode(self._window)
        if not is_last and (len(after) <= len(before) or after.endswith(_REPLACEMENT)):
            return ""
        self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        piece = after[len(before) :]
        self.text += piece
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skips_special)
