"""An engine that sends prepared answers: SGLang's protocol at minimal cost.

    python -m benchmarks.lib.canned_engine --folder MODEL_FOLDER --ready-fd N

    POST /generate, /v1/chat/completions    canned answers, plain and streaming
    POST /canned                            sets the pace of all following streams: see Pace
    GET  /model_info /server_info /v1/loads  read by a gateway; a scoring call gets scores

- Only the framing, the rid and three flags of a request are parsed, so that a core which also
  carries the load serves some 20,000 calls a second. Only the HTTP that the benchmarks use is
  supported.
"""

import argparse
import asyncio
import gc
import os
import re
from collections.abc import Callable
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import cast

import msgspec
import uvloop

from benchmarks.lib.corpus import Answer, Canned, read_canned
from rollmesh.core.process import Ready, announce, die_with_parent, listen

SCORES = re.compile(rb'"logprob_start_len":0\b')
IDS = re.compile(rb'"input_ids":\[([0-9,]*)\]')
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
RID = b"@rid@"
"""Placeholder for the caller's rid."""
DONE = b"data: [DONE]\n\n"
MARGIN = 512
"""Flags and rid are within this distance of a body's beginning or end; ids are between."""
MAX_HEAD_BYTES = 256 * 1024
"""Bytes kept of the beginning and the end of a longer body; images are between."""
INFO = {
    b"/model_info": b'{"model_path":"canned","weight_version":"1"}',
    b"/server_info": b'{"incremental_streaming_output":true,"random_seed":1,"version":"canned"}',
    b"/v1/loads": b'{"loads":[{"num_running_reqs":0,"num_waiting_reqs":0}]}',
    b"/abort_request": b"",
}


class Pace(msgspec.Struct, frozen=True):
    """Pace and form of streams; the body of POST /canned."""

    is_incremental: bool = True
    """If true, an event has only its own token; otherwise all tokens so far, as is SGLang's
    default.
    """
    num_events: int = 200
    events_per_s: float = 0.0
    """Events per second of one stream; 0: as fast as the reader takes them."""


class Framed(asyncio.Protocol):
    """HTTP/1.1 requests of a kept-alive connection, one at a time; calls `answer(line, body)` for
    each.
    """

    def __init__(self, engine: "CannedEngine") -> None:
        self._engine = engine
        self._parts: list[bytes] = []
        self._missing = 0
        self._num_head_parts = 0
        """The beginning of a long body in `_parts`; of what follows only the last parts are
        kept.
        """
        self.transport: asyncio.Transport
        self.is_full = False
        """Set while the peer does not read, so that writing must wait."""
        self.resumed: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(
            "asyncio.Transport", transport
        )  # uvloop's transport is no subclass of asyncio.Transport

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        resumed, self.resumed = self.resumed, None
        if resumed:
            resumed()

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            if self._num_head_parts:
                # Keep two parts, since the last read may be a few bytes only.
                del self._parts[self._num_head_parts : -2]
            elif sum(map(len, self._parts)) > MAX_HEAD_BYTES:
                self._num_head_parts = len(self._parts)
            return
        whole = data if len(self._parts) == 1 else b"".join(self._parts)
        head, mark, body = whole.partition(b"\r\n\r\n")
        if not self._num_head_parts:
            self._missing = _content_length(head) - len(body) if mark else 1
            if self._missing > 0:
                self._parts = [whole]
                return
        self._parts.clear()
        self._missing = self._num_head_parts = 0
        self._engine.answer(self, head.split(b" ", 2)[1], body)


class CannedEngine:
    """The engine's answers, shared by all connections."""

    def __init__(self, canned: Canned) -> None:
        self.pace = Pace()
        self._plain = cycle([_generated(answer) for answer in canned.answers])
        self._chats = cycle([_chat(answer, False) for answer in canned.answers])
        self._chats_with_logprobs = cycle([_chat(answer, True) for answer in canned.answers])
        self._events = {
            form: cycle([_events(answer, form) for answer in canned.streams])
            for form in (True, False)
        }

    def answer(self, to: Framed, path: bytes, body: bytes) -> None:
        """Answer one request."""
        flags = self.flags(body)
        if path == b"/generate":
            rid = flags.partition(b'"rid":"')[2].partition(b'"')[0]
            if b'"stream":true' in flags:
                return self._stream(to, rid)
            if SCORES.search(flags):
                return _write(to, _scores(body))
            before, after = next(self._plain)
            return _write(to, before + rid + after)
        if path == b"/v1/chat/completions":
            if b'"stream":true' in flags:
                return self.stream_chat(to)
            chats = self._chats_with_logprobs if b'"logprobs":true' in flags else self._chats
            return _write(to, next(chats))
        if path == b"/canned":
            self.pace = msgspec.json.decode(body, type=Pace)
            return _write(to, b"")
        return _write(to, INFO.get(path, b"{}"))

    def flags(self, body: bytes) -> bytes:
        """Return the part of a body that holds its flags."""
        return body if len(body) < 2 * MARGIN else body[:MARGIN] + body[-MARGIN:]

    def stream_chat(self, to: Framed) -> None:
        """Send a chat as one event, since this engine does not stream chats."""
        _write(to, next(self._chats))

    def _stream(self, to: Framed, rid: bytes) -> None:
        events = next(self._events[self.pace.is_incremental])[: self.pace.num_events]
        chunks = [chunk(b"data: %b%b%b\n\n" % (before, rid, after)) for before, after in events]
        chunks.append(chunk(DONE) + b"0\r\n\r\n")
        to.transport.write(STREAM_HEAD)
        Stream(to, chunks, self.pace.events_per_s).send_next()


class Stream:
    """A stream in progress: it sends one event at each due time, and none while the peer's buffer
    is full.
    """

    def __init__(self, to: Framed, chunks: list[bytes], events_per_s: float) -> None:
        self._to = to
        self._chunks = iter(chunks)
        self._loop = asyncio.get_running_loop()
        self._next_s = self._loop.time()
        self._pause_s = 1 / events_per_s if events_per_s else 0.0

    def send_next(self) -> None:
        """Send an event and schedule the next, if any."""
        if self._to.is_full:
            self._to.resumed = self.send_next
            return
        chunk = next(self._chunks, None)
        if chunk is None or self._to.transport.is_closing():
            return
        self._to.transport.write(chunk)
        if self._pause_s:
            self._next_s += self._pause_s
            self._loop.call_at(self._next_s, self.send_next)
        else:
            # One event per loop turn and stream, so that each is a separate write.
            self._loop.call_soon(self.send_next)


def _write(to: Framed, body: bytes) -> None:
    to.transport.write(HEAD % (len(body), body))


def chunk(data: bytes) -> bytes:
    """Frame a chunk of a stream's body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def _content_length(head: bytes) -> int:
    lower = head.lower()
    at = lower.find(b"content-length:")
    return int(lower[at + 15 :].partition(b"\r\n")[0]) if at >= 0 else 0


def _scores(body: bytes) -> bytes:
    """Return log-probs of a prompt, the same for the same ids."""
    found = IDS.search(body)
    ids = [int(i) for i in found[1].split(b",")] if found else []
    scores = [[None, i, None] if at == 0 else [-(i % 97) / 16, i, None] for at, i in enumerate(ids)]
    finish = {"type": "length", "length": 0}
    meta = {"finish_reason": finish, "weight_version": "1", "input_token_logprobs": scores}
    return msgspec.json.encode({"text": "", "output_ids": [], "meta_info": meta})


def _meta(answer: Answer, start: int, stop: int) -> dict[str, object]:
    """Return SGLang's meta_info of the tokens `start` to `stop`, and of the end if `stop` is the
    end.
    """
    is_last = stop == len(answer.token_ids)
    pairs = zip(answer.logprobs[start:stop], answer.token_ids[start:stop], strict=True)
    spans = {"weight_versions": [{"version": "1", "start": 0, "end": stop}]} if is_last else {}
    return {
        "id": RID.decode(),
        "finish_reason": {"type": "stop", "matched": answer.token_ids[-1]} if is_last else None,
        "prompt_tokens": 512,
        "weight_version": "1",
        "total_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[logprob, token_id, None] for logprob, token_id in pairs],
        "reasoning_tokens": 0,
        "completion_tokens": stop,
        "cached_tokens": 0,
        "e2e_latency": 0.004,
        **spans,
    }


def _generated(answer: Answer) -> tuple[bytes, bytes]:
    """Return a plain answer, split at its rid."""
    return _cut({
        "text": answer.text,
        "output_ids": answer.token_ids,
        "meta_info": _meta(answer, 0, len(answer.token_ids)),
    })  # fmt: skip


def _events(answer: Answer, is_incremental: bool) -> list[tuple[bytes, bytes]]:
    """Return the events of a stream; an event's text is as long as that of its tokens would be."""
    events = []
    num_chars = len(answer.text) / len(answer.token_ids)
    for stop in range(1, len(answer.token_ids) + 1):
        start = stop - 1 if is_incremental else 0
        text = answer.text[int(start * num_chars) : int(stop * num_chars)]
        ids, meta = answer.token_ids[start:stop], _meta(answer, start, stop)
        events.append(_cut({"text": text, "output_ids": ids, "meta_info": meta}))
    return events


def _cut(tree: dict[str, object]) -> tuple[bytes, bytes]:
    before, _, after = msgspec.json.encode(tree).partition(RID)
    return before, after


def _chat(answer: Answer, with_logprobs: bool) -> bytes:
    """Return the chat endpoint's form of the same answer."""
    entries = [
        {"token": "x" * 4, "logprob": logprob, "bytes": [120] * 4, "top_logprobs": []}
        for logprob in answer.logprobs
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": answer.text, "tool_calls": None},
        "logprobs": {"content": entries} if with_logprobs else None,
        "finish_reason": "stop",
        "token_ids": answer.token_ids if with_logprobs else None,
    }
    num_tokens = len(answer.token_ids)
    usage = {
        "prompt_tokens": 512,
        "completion_tokens": num_tokens,
        "total_tokens": 512 + num_tokens,
    }
    return msgspec.json.encode({
        "id": "chatcmpl-canned",
        "object": "chat.completion",
        "created": 1,
        "model": "policy",
        "choices": [choice],
        "usage": usage,
    })  # fmt: skip


async def serve(engine: CannedEngine, name: str, ready_fd: int | None) -> None:
    """Serve until killed."""
    listening = listen("127.0.0.1:0")
    loop = asyncio.get_running_loop()
    server = await loop.create_server(partial(Framed, engine), sock=listening, backlog=1024)
    gc.freeze()
    host, port = listening.getsockname()
    announce(ready_fd, Ready(name, os.getpid(), f"http://{host}:{port}"))
    await server.serve_forever()


def main() -> None:
    """Serve until killed."""
    arguments = argparse.ArgumentParser(prog="python -m benchmarks.lib.canned_engine")
    arguments.add_argument("--folder", type=Path, required=True)
    arguments.add_argument("--ready-fd", type=int)
    options = arguments.parse_args()
    die_with_parent()
    gc.disable()
    uvloop.run(serve(CannedEngine(read_canned(options.folder)), "canned", options.ready_fd))


if __name__ == "__main__":
    main()
