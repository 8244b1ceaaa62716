"""The cost of turning text into tokens, and tokens into deltas, in one process.

    python -m benchmarks.tokens [--quick] [--json] [--check]

- Texts are pieces of source code, new at each call, so that no cache answers.
- A figure is the CPU time of the best of several rounds, in microseconds a call.
"""

import time
from collections.abc import Callable, Sequence

import msgspec
import tokenizers

from benchmarks.lib.corpus import Texts, model_folder
from benchmarks.lib.report import Goal, parser, report
from rollmesh.runtime.chat import ParseOptions, read_message
from rollmesh.runtime.tokens.families import choose_family
from rollmesh.runtime.tokens.prompts import Chat, Prompts
from rollmesh.runtime.tokens.tokenizer import load_tokenizer

CALL = (
    "<think>\nfirst a look\n</think>\n\nok\n<tool_call>\n"
    '{"name": "bash", "arguments": {"command": "ls -la /tmp; cat x.py | head -20"}}\n</tool_call>'
)
GOALS = [
    Goal("extend_by_a_tool_message_of_800_chars_us", "<=", 40),
    Goal("first_chat_of_1kb_us", "<=", 60),
    Goal("first_chat_seen_before_us", "<=", 2),
    Goal("read_a_reply_of_64_tokens_us", "<=", 15),
]


class FunctionTimer:
    """Measure functions with new arguments for each call."""

    def __init__(self, num_rounds: int) -> None:
        self.figures: dict[str, float] = {}
        self._num_rounds = num_rounds

    def time(self, name: str, make: Callable[[], object], run: Callable[..., object]) -> None:
        """Return the best mean time of `run` over 300 arguments that `make` makes."""
        best_s = float("inf")
        for _ in range(self._num_rounds):
            arguments = [make() for _ in range(300)]
            start_s = time.thread_time()
            for argument in arguments:
                run(argument)
            best_s = min(best_s, (time.thread_time() - start_s) / len(arguments))
        self.figures[f"{name}_us"] = best_s * 1e6


def chat(*messages: dict[str, str]) -> Chat:
    """Build the prompt as a session does."""
    raws = [msgspec.json.encode(message) for message in messages]
    return Chat(raws, [read_message(raw, n) for n, raw in enumerate(raws)])


def main() -> None:
    """Measure and report."""
    options = parser("tokens").parse_args()
    bench = FunctionTimer(num_rounds=3 if options.quick else 15)
    folder, texts = model_folder(), Texts(seed=1)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    start_s = time.thread_time()
    tokenizer = load_tokenizer(folder)
    start_ms = (time.thread_time() - start_s) * 1e3
    prompts = Prompts(choose_family(folder, "auto", tokenizer), tokenizer)
    reply_ids = [*tokenizer.encode(texts.piece(600))[:63], prompts.stop_token_ids[0]]
    called = tokenizer.encode(CALL + "<|im_end|>")
    system = {"role": "system", "content": "You are a careful engineer."}

    def read(token_ids: Sequence[int]) -> None:
        prompts.answer(ParseOptions((), True, "call"), token_ids)

    def stream(token_ids: Sequence[int]) -> None:
        reader = prompts.reader(ParseOptions((), True, "call"))
        for token_id in token_ids:
            reader.feed([token_id])
        reader.end(len(token_ids))

    def tool() -> Chat:
        return chat({"role": "tool", "tool_call_id": "c", "content": texts.piece(800)})

    def distinct() -> Chat:
        return chat(system, {"role": "user", "content": texts.piece(1000)})

    seen = distinct()
    bench.time("encode_1100_chars", lambda: texts.piece(1100), tokenizer.encode)
    bench.time("encode_1100_chars_by_tokenizers", lambda: texts.piece(1100), library.encode)
    bench.time("first_chat_of_1kb", distinct, prompts.first)
    bench.time("first_chat_seen_before", lambda: seen, prompts.first)
    bench.time(
        "extend_by_a_tool_message_of_800_chars",
        tool,
        lambda asked: prompts.extend(reply_ids, asked),
    )
    bench.time("read_a_reply_of_64_tokens", lambda: reply_ids, read)
    bench.time("read_a_call_of_45_tokens", lambda: called, read)
    bench.time("stream_a_reply_of_64_tokens_one_by_one", lambda: reply_ids, stream)
    report(options, {"load_the_tokenizer_ms": start_ms} | bench.figures, GOALS)


if __name__ == "__main__":
    main()
