"""Text to token ids by tiktoken, where it gives what the library tokenizers gives, but faster.

Owns the reading of a byte-level BPE out of tokenizer.json, and the self-test that decides at start
whether it may be used: a fixed corpus, texts made from the vocabulary and look-alikes of the added
tokens have to give the very ids that `tokenizers` gives. Invariant: a FastEncoder exists only where
that held. Added tokens are cut out here, since tiktoken knows no NFC and takes the first match, not
the longest. Driven by tokenizer.py, once per process.

Measured (benchmarks/tokens.py, 1 KB of code, 32k vocabulary): 45 us against 195 us.
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

MAX_CHARS = 200_000
"""Longer texts go the slow way: tiktoken's regex engine gives up on a million blanks in a row."""
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""What `ByteLevel` splits by when it is told to use its own."""


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False


class FastEncoder:
    """Encodes as the folder's tokenizer.json says; see the module."""

    def __init__(
        self, bpe: Callable[[str], list[int]], added: Sequence[_AddedToken], composes: bool
    ) -> None:
        """`composes`: text is brought into Unicode's NFC, and some tokens are found only then."""
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
    """Added tokens, which stand for themselves wherever they occur."""

    def __init__(self, tokens: Sequence[_AddedToken]) -> None:
        self._ids = {token.content: token.id for token in tokens}
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self._firsts = tuple({text[0] for text in self._ids})

    def around(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        """Their ids, and what `encode` gives for the text between them."""
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
    """An encoder that equals `backend`, or None where that cannot be had.

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
    import tiktoken  # noqa: PLC0415 - see tokenizer.py's load_tokenizer

    bpe = tiktoken.Encoding("model", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    return FastEncoder(bpe.encode_ordinary, added, composes)


def _pattern(spec: dict[str, Any]) -> str | None:
    """The regular expression that splits text before BPE; None where it is something else."""
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
    """Whether text is brought into NFC; None where something else is done to it."""
    if spec is None:
        return False
    return True if spec["type"] == "NFC" else None


def _is_by_rank(model: dict[str, Any], num_tokens: int) -> bool:
    """Whether merges make all tokens but the bytes, in the order of their ids.

    That is what tiktoken takes for granted, since it has no list of merges.
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
    """Texts that tell tokenizers apart: about 40 KB, the same at each start."""
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
