"""Text to token ids and back, over a model folder's tokenizer.json, without transformers.

Owns the folder's vocabulary as a table of bytes per id, so that a decoded stream is cut at whole
characters and decoding costs a join. Invariants: ids are those of the library tokenizers, whoever
encodes (encoder.py); `decode` gives what it gives with special tokens shown, and the pieces of a
Detokenizer join to `decode` of all its ids. Satisfies the Tokenizer protocol of the library
renderers. Driven by prompts.py and marked.py.
"""

import codecs
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from rollmesh.core.errors import ModelError
from rollmesh.core.logs import get_logger
from rollmesh.runtime.encoder import MAX_CHARS, fast_encoder

if TYPE_CHECKING:
    import tokenizers

log = get_logger()

_SHORT_CHARS = 48
"""Texts up to this length are encoded once: role tags and separators come back in every turn."""


class Tokenizer:
    """One per process; stateless but for caches."""

    def __init__(
        self, backend: "tokenizers.Tokenizer", name_or_path: str = "", vocab_size: int = 0
    ) -> None:
        """`vocab_size` is the model's; its embedding often has more rows than there are texts."""
        self.name_or_path = name_or_path
        self.unk_token_id: int | None = None
        self.vocab_size: int = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        """Ids are below this; a model may sample one that has no text."""
        self._backend = backend
        spec = orjson.loads(backend.to_str())
        self._pieces = _byte_pieces(backend, spec)
        fast = fast_encoder(backend, spec, self._pieces) if self._pieces else None
        self.is_fast = fast is not None
        """Whether text is encoded by tiktoken; else by the library tokenizers."""
        self._encode_fast = fast.encode if fast else self._encode_slow
        self._encode_short = functools.lru_cache(maxsize=1024)(self._encode_anew)
        self._token_to_id = functools.lru_cache(maxsize=256)(backend.token_to_id)

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised, none are added."""
        assert not add_special_tokens, "a chat template writes its special tokens itself"
        if len(text) <= _SHORT_CHARS:
            return list(self._encode_short(text))
        return self._encode_anew(text)

    def decode(self, token_ids: int | Sequence[int], **_: Any) -> str:
        """The text of `token_ids`, special tokens included; bytes that are no text are U+FFFD."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if self._pieces is None:
            return self._backend.decode(list(ids), skip_special_tokens=False)
        return _join(self._pieces, ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token's bytes, which may be a part of a character."""
        if self._pieces is None:
            return self.decode(token_id).encode()
        return _join(self._pieces, (token_id,))

    def convert_tokens_to_ids(self, tokens: str | list[str]) -> Any:
        """The id of a token's text, or None; for a list, a list."""
        if isinstance(tokens, str):
            return self._token_to_id(tokens)
        return [self._token_to_id(token) for token in tokens]

    def stream(self) -> "Detokenizer":
        """A decoder for one generation's ids as they come."""
        return Detokenizer(self._backend, self._pieces)

    def _encode_anew(self, text: str) -> list[int]:
        return self._encode_fast(text) if len(text) <= MAX_CHARS else self._encode_slow(text)

    def _encode_slow(self, text: str) -> list[int]:
        # The batch call without offsets is faster than `encode`, also for one text.
        encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoded[0].ids


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Ids to text piece by piece, never cutting a character in two."""

    def __init__(self, backend: "tokenizers.Tokenizer", pieces: list[bytes] | None) -> None:
        self._backend = backend
        self._pieces = pieces
        self._utf8 = _Utf8Decoder("replace")
        self._stream: tokenizers.decoders.DecodeStream | None = None
        if pieces is None:
            from tokenizers.decoders import DecodeStream  # noqa: PLC0415 - see load_tokenizer

            self._stream = DecodeStream(skip_special_tokens=False)

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that `token_ids` complete; bytes of an unfinished character wait."""
        if self._stream is not None:
            step = self._stream.step
            return "".join([step(self._backend, i) or "" for i in token_ids])
        return self._utf8.decode(_join(self._pieces or [], token_ids))

    def end(self) -> str:
        """What was held back, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder; ModelError if it has none."""
    import tokenizers  # noqa: PLC0415 - 5 MB, which a relay rests lower without

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder}: no tokenizer.json in it; model.path wants a model folder")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - door: the library raises bare Exception
        raise ModelError(f"{path}: not a tokenizer: {error}") from None
    tokenizer = Tokenizer(backend, str(folder), _model_vocab_size(folder))
    if not tokenizer.is_fast:
        log.warning("tokenizer.slow", path=str(path), reason="tiktoken would encode otherwise")
    return tokenizer


def _model_vocab_size(folder: Path) -> int:
    """By config.json, 0 where it does not say; multimodal models say it of their text part."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
        return int(config.get("vocab_size") or config.get("text_config", {})["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _join(pieces: list[bytes], token_ids: Sequence[int]) -> bytes:
    """The bytes of `token_ids`; ids without a text, which a model may sample, have none."""
    try:
        return b"".join([pieces[i] for i in token_ids])
    except IndexError:
        return b"".join([pieces[i] for i in token_ids if i < len(pieces)])


def _byte_pieces(backend: "tokenizers.Tokenizer", spec: dict[str, Any]) -> list[bytes] | None:
    """The bytes of each id of a byte-level BPE vocabulary; None for other kinds of tokenizers.

    The mapping of bytes to printable characters is GPT-2's `bytes_to_unicode`.
    """
    decoder = spec.get("decoder") or {}
    if decoder.get("type") != "ByteLevel":
        return None
    byte_of = _byte_level_alphabet()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    pieces = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        try:
            pieces[token_id] = bytes([byte_of[char] for char in token])
        except KeyError:
            pieces[token_id] = token.encode()
    return pieces


def _byte_level_alphabet() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    table.update({chr(256 + n): byte for n, byte in enumerate(others)})
    return table
