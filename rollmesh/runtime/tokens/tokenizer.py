"""Text to token ids and back, by a model folder's tokenizer.json, without transformers.

- Ids are those of the `tokenizers` library. A byte-level BPE is encoded by tiktoken if a self-test
  at start (a fixed corpus, texts from the vocabulary, look-alikes of added tokens) returns equal
  ids: 45 us instead of 195 us for 1 KB of code (benchmarks/tokens.py).
- The pieces of a Detokenizer join to `decode` of all its ids, including special tokens.
"""

import itertools
import random
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    import tokenizers
import codecs
import functools
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from rollmesh.core.errors import ModelError
from rollmesh.core.logs import get_logger

if TYPE_CHECKING:
    import tokenizers


MAX_CHARS = 200_000
"""Longer texts are encoded by the slow path: tiktoken's regex engine fails at a million spaces in a
row."""
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of `ByteLevel` if it uses its own."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class FastEncoder:
    """Encodes by tiktoken, with the ids of the folder's tokenizer.json."""

    def __init__(
        self, bpe: Callable[[str], list[int]], added: Sequence[_AddedToken], composes: bool
    ) -> None:
        """`composes`: text is normalised to Unicode's NFC, in which some added tokens are found
        only then."""
        self._bpe = bpe
        self._composes = composes
        self._raw = _Cuts([token for token in added if not token.normalized])
        self._composed = _Cuts([token for token in added if token.normalized])

    def encode(self, text: str) -> list[int]:
        """Token ids; added tokens in the text are recognised."""
        return self._raw.around(text, self._encode_composed)

    def _encode_composed(self, text: str) -> list[int]:
        if self._composes and not text.isascii():
            text = unicodedata.normalize("NFC", text)
        return self._composed.around(text, self._bpe)


class _Cuts:
    """Added tokens, which are recognised anywhere in a text."""

    def __init__(self, tokens: Sequence[_AddedToken]) -> None:
        self._ids = {token.content: token.id for token in tokens}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._firsts = tuple({text[0] for text in self._ids})

    def around(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Their ids, and the ids of the text between them by `encode`."""
        for first in self._firsts:
            if first in text:
                break
        else:
            return encode(text)
        ids: list[int] = []
        start = 0
        for found in self._pattern.finditer(text):
            if found.start() > start:
                ids += encode(text[start : found.start()])
            ids.append(self._ids[found.group()])
            start = found.end()
        if not start:
            return encode(text)
        return ids + encode(text[start:]) if start < len(text) else ids


def fast_encoder(
    backend: "tokenizers.Tokenizer", spec: dict[str, Any], pieces: Sequence[bytes]
) -> FastEncoder | None:
    """An encoder equal to `backend`; None if there is none.

    `spec` is the tree of tokenizer.json, `pieces` are the bytes of each id.
    """
    try:
        encoder = _build(spec, pieces)
    except (KeyError, TypeError, ValueError, msgspec.MsgspecError):
        return None
    if encoder is None:
        return None
    texts = _corpus(spec, pieces)
    wanted = backend.encode_batch_fast(texts, add_special_tokens=False)
    same = all(encoder.encode(t) == w.ids for t, w in zip(texts, wanted, strict=True))
    return encoder if same else None


def _build(spec: dict[str, Any], pieces: Sequence[bytes]) -> FastEncoder | None:
    model = spec["model"]
    pattern = _pattern(spec["pre_tokenizer"])
    composes = _composes(spec.get("normalizer"))
    added = msgspec.convert(spec.get("added_tokens") or [], list[_AddedToken])
    plain = (
        model["type"] == "BPE"
        and not model.get("dropout")
        and not model.get("byte_fallback")
        and not model.get("continuing_subword_prefix")
        and not model.get("end_of_word_suffix")
        and spec.get("truncation") is None
        and spec.get("padding") is None
        and not any(token.single_word or token.lstrip or token.rstrip for token in added)
        and all(token.content.isascii() for token in added if token.normalized)
    )
    own_ids = {token.id for token in added}
    ranks = {pieces[i]: i for i in model["vocab"].values() if i not in own_ids}
    if not plain or pattern is None or composes is None or not _is_by_rank(model, len(ranks)):
        return None
    if any(bytes([byte]) not in ranks for byte in range(256)):
        return None
    import tiktoken  # noqa: PLC0415 - see load_tokenizer

    bpe = tiktoken.Encoding("model", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return FastEncoder(bpe.encode_ordinary, added, composes)


def _pattern(spec: dict[str, Any]) -> str | None:
    """The regular expression that splits text before BPE; None for another kind of splitter."""
    if spec["type"] == "ByteLevel":
        return _GPT2_PATTERN if spec["use_regex"] and not spec["add_prefix_space"] else None
    if spec["type"] != "Sequence":
        return None
    split, level = spec["pretokenizers"]
    is_plain = (
        split["type"] == "Split"
        and split["behavior"] == "Isolated"
        and not split["invert"]
        and level["type"] == "ByteLevel"
        and not level["use_regex"]
        and not level["add_prefix_space"]
    )
    return str(split["pattern"]["Regex"]) if is_plain else None


def _composes(spec: dict[str, Any] | None) -> bool | None:
    """Whether text is normalised to NFC; None for another normaliser."""
    if spec is None:
        return False
    return True if spec["type"] == "NFC" else None


def _is_by_rank(model: dict[str, Any], num_tokens: int) -> bool:
    """Whether merges create all tokens except bytes, in the order of their ids.

    tiktoken requires this, since it has no list of merges.
    """
    vocabulary = model["vocab"]
    pairs = (m.split(" ") if isinstance(m, str) else m for m in model["merges"])
    ids = [vocabulary[left + right] for left, right in pairs]
    in_order = all(one < next_one for one, next_one in itertools.pairwise(ids))
    return in_order and len(ids) == num_tokens - 256


_PROSE = (
    "The quick brown fox can't jump; it's 3.14159, isn't it? WE'LL SEE, they'd SAID 1234567890.",
    "def f(x: int) -> dict[str, Any]:\n    return {'a': [x ** 2, None], \"b\": f'{x!r:>10}'}\n\n\n",
    '{"name": "edit", "arguments": {"path": "/a/b.py", "old": "\\tif x:\\n", "n": -1e-9}}',
    "for (int i=0;i<n;++i){ a[i]&=~(1u<<i); } // \t\ttabs\r\nwindows\r\n\r\n\x0b\x0c\x1c\x85",
    "e\u0301a\u0308o\u0302 \u1e9b\u0323 \u212b \u2126 \uac00\u1100\u1161\u11a8 \u0958 \ufb1d",
    "\u4f60\u597d\uff0c\u4e16\u754c\u3002 \u3053\u3093\u306b\u3061\u306f \ud55c\uad6d\uc5b4",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0939\u093f\u0928\u094d\u0926\u0940",
    "\U0001f469\u200d\U0001f52c\U0001f1e9\U0001f1ea\u2764\ufe0f \U0001d4d7 \u200b\u2060\ufeff\xa0x",
    "\u2028\u2029\u3000\u180e\u1680 \u2007.\u202f!  \n \n\t \n   end   ",
    "\u0661\u0662\u0663 \u00b2\u00bd \u2167 \u0e51\u0e52 x\u0300\u0316 \u017f\u212a 'S 'LL \u2019s",
    "a" * 700 + "!" * 300 + "\n" * 200 + " " * 900 + "z" + "=" * 500 + "\t" * 90,
)
_ALPHABET = " \n\t\r  aZ0.'_-<>|{}\"\\/\xa0\xdf\u0301\u0308\u3000\u4f60\u0e33\u200d\U0001f642"


def _corpus(spec: dict[str, Any], pieces: Sequence[bytes]) -> list[str]:
    """Texts that distinguish tokenizers: about 40 KB, equal at each start."""
    chance = random.Random(0)
    added = [token["content"] for token in spec.get("added_tokens") or []]
    texts = list(_PROSE)
    for token in added:
        texts += [token, f"a{token}b {token}\n", token[:-1], token[1:], f"{token}\u0338{token[0]}"]
    known = pieces[:: max(1, len(pieces) // 1500)]
    texts += [piece.decode("utf-8", "ignore") for piece in known]
    parts = [*_ALPHABET, *added, *texts[:64]]
    texts += ["".join(chance.choices(_ALPHABET, k=24)) for _ in range(250)]
    texts += ["".join(chance.choices(parts, k=6))[:200] for _ in range(100)]
    return texts


log = get_logger()

_SHORT_CHARS = 48
"""Encodings of texts up to this length are cached: role tags and separators recur in every turn."""


class Tokenizer:
    """The tokenizer of a process; stateless except for caches."""

    def __init__(
        self, backend: "tokenizers.Tokenizer", name_or_path: str = "", vocab_size: int = 0
    ) -> None:
        """`vocab_size` is the model's; its embedding often has more rows than there are tokens with
        text."""
        self.name_or_path = name_or_path
        self.unk_token_id: int | None = None
        self.vocab_size: int = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        """Ids are below this; a model may sample one that has no text."""
        self._backend = backend
        spec = orjson.loads(backend.to_str())
        self._pieces = _byte_pieces(backend, spec)
        fast = fast_encoder(backend, spec, self._pieces) if self._pieces else None
        self.is_fast = fast is not None
        """Whether text is encoded by tiktoken; else by the `tokenizers` library."""
        self._encode_fast = fast.encode if fast else self._encode_slow
        self._encode_short = functools.lru_cache(maxsize=1024)(self._encode_uncached)
        self._token_to_id = functools.lru_cache(maxsize=256)(backend.token_to_id)

    def encode(self, text: str, *, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Token ids of `text`; special tokens written in it are recognised, none are added."""
        assert not add_special_tokens, "a chat template writes its special tokens itself"
        if len(text) <= _SHORT_CHARS:
            return list(self._encode_short(text))
        return self._encode_uncached(text)

    def decode(self, token_ids: int | Sequence[int], **_: Any) -> str:
        """The text of `token_ids`, including special tokens; invalid UTF-8 becomes U+FFFD."""
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
        """An incremental decoder of one generation's ids."""
        return Detokenizer(self._backend, self._pieces)

    def _encode_uncached(self, text: str) -> list[int]:
        return self._encode_fast(text) if len(text) <= MAX_CHARS else self._encode_slow(text)

    def _encode_slow(self, text: str) -> list[int]:
        # The batch call without offsets is faster than `encode`, also for one text.
        encoded = self._backend.encode_batch_fast([text], add_special_tokens=False)
        return encoded[0].ids


_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Ids to text piece by piece, never splitting a character."""

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
        """The waiting bytes, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder; ModelError if it has none."""
    import tokenizers  # noqa: PLC0415 - 5 MB, which a relay does not need

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelError(f"{folder}: no tokenizer.json in it; model.path must be a model folder")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - door: the library raises bare Exception
        raise ModelError(f"{path}: not a tokenizer: {error}") from None
    tokenizer = Tokenizer(backend, str(folder), _model_vocab_size(folder))
    if not tokenizer.is_fast:
        log.warning("tokenizer.slow", path=str(path), reason="tiktoken encodes differently")
    return tokenizer


def _model_vocab_size(folder: Path) -> int:
    """Size by config.json, 0 if it has none; multimodal models have it in their text config."""
    try:
        config = orjson.loads((folder / "config.json").read_bytes())
        return int(config.get("vocab_size") or config.get("text_config", {})["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return 0


def _join(pieces: list[bytes], token_ids: Sequence[int]) -> bytes:
    """The bytes of `token_ids`; ids without text, which a model may sample, have none."""
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
