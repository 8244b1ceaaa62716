"""The soak's engine: canned answers that are tool calls, and streamed chats.

    python -m benchmarks.lib.soak_engine --folder MODEL_FOLDER --ready-fd N

- An answer's tokens parse as one call of `click` in Qwen's format, and the chat endpoint answers
  with the same call. Request bodies are dropped unread, so 22 MB cost this side little.
"""

import argparse
import os
import random
from itertools import cycle
from pathlib import Path

import msgspec
import uvloop

from benchmarks.lib.canned_engine import (
    DONE,
    STREAM_HEAD,
    CannedEngine,
    Framed,
    Pace,
    Stream,
    chunk,
    serve,
)
from benchmarks.lib.corpus import Answer, Canned, read_canned
from rollmesh.core.process import die_with_parent
from rollmesh.runtime.tokens.tokenizer import load_tokenizer
from rollmesh.testing.model_folder import write_large_folder

GIVE_WAY = 5
"""Niceness, the same as of the agents: measured processes have priority."""
NUM_ANSWERS = 64
EVENTS_PER_S = 1000.0
"""Events of a stream, so that a client can disconnect in its middle."""


def write_folder(folder: Path) -> Path:
    """Write a vision model's folder with answers; return the folder."""
    write_large_folder(folder, "qwen3_vl")
    tokenizer, chance = load_tokenizer(folder), random.Random(0)
    opens, closes, end = tokenizer.convert_tokens_to_ids(
        ["<tool_call>", "</tool_call>", "<|im_end|>"]
    )

    def answer() -> Answer:
        text = f"I see a form with {chance.randrange(1000)} fields, and click."
        arguments = f'{{"x": {chance.randrange(2000)}, "y": {chance.randrange(1000)}}}'
        call = f'\n{{"name": "click", "arguments": {arguments}}}\n'
        ids = [*tokenizer.encode(text + "\n"), opens, *tokenizer.encode(call), closes, end]
        logprobs = [-chance.expovariate(2.0) for _ in ids]
        return Answer(ids, logprobs, f"{text}\0{arguments}")

    answers = [answer() for _ in range(NUM_ANSWERS)]
    (folder / "answers.json").write_bytes(msgspec.json.encode(Canned(answers, answers)))
    return folder


class SoakEngine(CannedEngine):
    """A canned engine whose chats are tool calls; `/generate` is unchanged."""

    def __init__(self, canned: Canned) -> None:
        super().__init__(canned)
        self.pace = Pace(events_per_s=EVENTS_PER_S)
        self._chat_streams = cycle([_chat_events(answer) for answer in canned.answers])
        self._chats = self._chats_with_logprobs = cycle([_chat(a) for a in canned.answers])

    def flags(self, body: bytes) -> bytes:
        # With images, which come last, the flags are behind the ids.
        return body

    def stream_chat(self, to: Framed) -> None:
        to.transport.write(STREAM_HEAD)
        Stream(to, list(next(self._chat_streams)), self.pace.events_per_s).send_next()


def _chat(answer: Answer) -> bytes:
    """Return a plain chat completion."""
    text, _, arguments = answer.text.partition("\0")
    function = {"name": "click", "arguments": arguments}
    call = {"id": _call_id(answer), "type": "function", "function": function}
    message = {"role": "assistant", "content": text, "tool_calls": [call]}
    choice: dict[str, object] = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    return msgspec.json.encode(_completion("chat.completion", choice) | {"usage": _usage(answer)})


def _chat_events(answer: Answer) -> list[bytes]:
    """Return the same answer as chunks of a stream."""
    text, _, arguments = answer.text.partition("\0")
    deltas: list[dict[str, object]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": f"{word} "} for word in text.split(" ")[:-1]]
    deltas.append({"content": text.rpartition(" ")[2]})
    function = {"name": "click", "arguments": arguments}
    call = {"index": 0, "id": _call_id(answer), "type": "function", "function": function}
    deltas.append({"tool_calls": [call]})
    choices: list[dict[str, object]]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    choices.append({"index": 0, "delta": {}, "finish_reason": "tool_calls"})
    kind = "chat.completion.chunk"
    events = [msgspec.json.encode(_completion(kind, choice)) for choice in choices]
    return [*(chunk(b"data: %b\n\n" % event) for event in events), chunk(DONE) + b"0\r\n\r\n"]


def _completion(kind: str, choice: dict[str, object]) -> dict[str, object]:
    completion: dict[str, object] = {
        "id": "chatcmpl-soak",
        "object": kind,
        "created": 1,
        "model": "policy",
    }
    completion["choices"] = [choice]
    return completion


def _usage(answer: Answer) -> dict[str, int]:
    num = len(answer.token_ids)
    return {"prompt_tokens": 512, "completion_tokens": num, "total_tokens": 512 + num}


def _call_id(answer: Answer) -> str:
    return f"call_{abs(hash(tuple(answer.token_ids))):x}"


def main() -> None:
    """Serve until killed."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.lib.soak_engine")
    arguments.add_argument("--folder", type=Path, required=True)
    arguments.add_argument("--ready-fd", type=int)
    options = arguments.parse_args()
    die_with_parent()
    os.nice(GIVE_WAY)
    uvloop.run(serve(SoakEngine(read_canned(options.folder)), "engine", options.ready_fd))


if __name__ == "__main__":
    main()
