"""The texts of the benchmarks: prompts, canned answers, a 32k tokenizer.

    python -m benchmarks.lib.corpus      makes the folder, which takes half a minute once

The model folder is made from Python's own sources and kept under build/: a byte-level BPE
vocabulary as dense as a real one, Qwen3's pre-tokenizer and chat format, and answers of real token
ids that decode to plausible text. The same interpreter makes the same folder.
"""

import hashlib
import random
import subprocess
import sys
import sysconfig
from array import array
from pathlib import Path

import msgspec

VOCAB_SIZE = 32_768
MAX_TOKENS = 131_072
NUM_ANSWERS = 512
ANSWER_TOKENS = 64
NUM_STREAMS = 16
STREAM_TOKENS = 200

_FOLDER = Path(__file__).parents[2] / "build" / "bench-model"
_TRAIN_CHARS = 6_000_000


class Answer(msgspec.Struct, frozen=True):
    """A canned answer: its tokens, the last of which ends the turn, and their text."""

    token_ids: list[int]
    logprobs: list[float]
    text: str


class Canned(msgspec.Struct, frozen=True):
    """All answers of the engine."""

    answers: list[Answer]
    """Answers for plain calls."""
    streams: list[Answer]
    """Longer answers, for streams."""


def sources() -> str:
    """Return Python's standard library as one ASCII text, in a fixed order."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    files += sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*/*.py"))
    texts, num_chars = [], 0
    for file in files:
        text = file.read_text(errors="replace")
        if text.isascii() and num_chars < _TRAIN_CHARS:
            texts.append(text)
            num_chars += len(text)
    return "\n".join(texts)


class Texts:
    """Pieces of source code, a new one at each call."""

    def __init__(self, seed: int) -> None:
        self._whole = sources()
        self._random = random.Random(seed)

    def piece(self, num_chars: int) -> str:
        """Return `num_chars` characters from a random place."""
        start = self._random.randrange(len(self._whole) - num_chars)
        return self._whole[start : start + num_chars]


def model_folder() -> Path:
    """Return the folder; if it is missing, a separate process makes it (which loads torch)."""
    identity = hashlib.sha256((sys.version + Path(__file__).read_text()).encode()).hexdigest()
    folder = _FOLDER / identity[:12]
    if not (folder / "answers.json").is_file():
        print("benchmarks: making a 32k tokenizer; once", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "benchmarks.lib.corpus", str(folder)], check=True)
    return folder


def read_canned(folder: Path) -> Canned:
    """Return the answers in the folder."""
    return msgspec.json.decode((folder / "answers.json").read_bytes(), type=Canned)


def _make(folder: Path) -> None:
    from rollmesh.trainer.models.tiny import train_tokenizer  # noqa: PLC0415 - loads torch

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer([sources()], VOCAB_SIZE)
    tokenizer.save(str(folder / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    assert end is not None
    config = {"model_type": "qwen3", "eos_token_id": end, "vocab_size": VOCAB_SIZE}
    config["max_position_embeddings"] = MAX_TOKENS
    settings = {"eos_token": "<|im_end|>"}
    for name, tree in (("config", config), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_bytes(msgspec.json.encode(tree))
    chance, texts = random.Random(0), Texts(seed=0)

    def answer(num_tokens: int) -> Answer:
        ids: list[int] = []
        while len(ids) < num_tokens - 1:
            # Start at a line's first word: outer white space would not be reported.
            text = texts.piece(12 * num_tokens).partition("\n")[2].lstrip()
            ids = tokenizer.encode(text).ids
        ids = [*ids[: num_tokens - 1], end]
        # Printed as engines do: a float32 with all the digits of a float64.
        logprobs = array("f", [-chance.expovariate(2.0) for _ in ids]).tolist()
        return Answer(ids, logprobs, tokenizer.decode(ids[:-1], skip_special_tokens=False).strip())

    canned = Canned(
        [answer(ANSWER_TOKENS) for _ in range(NUM_ANSWERS)],
        [answer(STREAM_TOKENS) for _ in range(NUM_STREAMS)],
    )
    (folder / "answers.json").write_bytes(msgspec.json.encode(canned))


if __name__ == "__main__":
    _make(Path(sys.argv[1]))
