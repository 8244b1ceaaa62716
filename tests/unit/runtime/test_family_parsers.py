"""Every family of the library that works offline extends prompts and parses replies as the
library does.

One tokenizer with the markers of all families replaces theirs; gpt-oss is missing, because its
renderer downloads a vocabulary.
"""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import renderers
from tokenizers import AddedToken
from tokenizers import Tokenizer as Library

from rollmesh.runtime.chat import DeltaReader, ParsedReply, ParseOptions, read_message
from rollmesh.runtime.tokens.families import Family, choose_family
from rollmesh.runtime.tokens.prompts import Chat, Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer
from rollmesh.testing.model_folder import VISION_TOKENS, write_model_folder

FAMILIES = [
    *("deepseek-r1", "deepseek-v3", "deepseek-v4", "gemma4", "glm-4.5", "glm-5", "glm-5.1"),
    *("glm-5.3", "hy3", "inkling", "kimi-k2", "kimi-k2.5", "laguna-m.1", "laguna-s-2.1"),
    *("laguna-xs-2.1", "laguna-xs.2", "llama-3", "minimax-m2", "nemotron-3", "nemotron-3-ultra"),
    *("nemotron-3.5", "prime-qwen3", "qwen3", "qwen3-vl", "qwen3.5", "qwen3.6", "qwen3.8"),
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "description": "d",
            "parameters": {"type": "object", "properties": {"s": {"type": "string"}}},
        },
    }
]
TOOLS_JSON = json.dumps(TOOLS).encode()
CALL = {"id": "functions.f:0", "function": {"name": "f", "arguments": {"s": "a \u4f60"}}}
REPLIES: list[dict[str, Any]] = [
    {"content": "I guess 4"},
    {"content": "I guess 4", "reasoning_content": "hm, so"},
    {"content": "so", "tool_calls": [CALL]},
    {"content": "so", "reasoning_content": "hm", "tool_calls": [CALL]},
]
USER: dict[str, Any] = {"role": "user", "content": "guess"}
NEWS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "higher, \u4f60"}],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_model_folder(tmp_path_factory.mktemp("families"))
    tokenizer = Library.from_file(str(folder / "tokenizer.json"))
    marks = json.loads((Path(__file__).parent / "family_tokens.json").read_text())
    tokenizer.add_tokens([AddedToken(m, normalized=False) for m in [*marks, *VISION_TOKENS]])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def family(name: str, folder: Path, tokenizer: Tokenizer) -> Family:
    return choose_family(folder, name, tokenizer)


def chat(messages: list[dict[str, Any]], tools: bytes = b"") -> Chat:
    raws = [msgspec.json.encode(message) for message in messages]
    return Chat(raws, [read_message(raw, n) for n, raw in enumerate(raws)], tools)


def test_an_extension_needs_no_history(family: Family, tokenizer: Tokenizer) -> None:
    prompts = Prompts(family, tokenizer)
    history = list(prompts.first(chat([USER])))
    for n in range(6):
        is_cut = n == 4
        sampled = plain_reply(prompts, tokenizer, history)[: -1 if is_cut else None]
        extension = prompts.extend(sampled, chat(NEWS[n % 2]))
        bridged = family.renderer.bridge_to_next_turn(history, sampled, NEWS[n % 2], tools=None)
        assert extension is not None
        history += [*sampled, *extension]
        assert bridged is not None or is_cut
        assert bridged is None or bridged.token_ids == history


def test_a_reply_is_parsed_as_the_library_parses_it(
    name: str, family: Family, tokenizer: Tokenizer
) -> None:
    prompts = Prompts(family, tokenizer)
    library = renderers.create_renderer(tokenizer, renderers.config_from_name(name))
    prompt = list(prompts.first(chat([USER], TOOLS_JSON)))
    for reply in REPLIES:
        messages = [USER, {"role": "assistant", **reply}]
        whole = family.renderer.render_ids(messages, tools=TOOLS, add_generation_prompt=False)
        sampled, num_calls = whole[len(prompt) :], len(reply.get("tool_calls", ()))
        if whole[: len(prompt)] != prompt:
            # Templates drop reasoning from the history, but this prompt has opened it.
            sampled, num_calls = plain_reply(prompts, tokenizer, prompt), 0
        answer, _ = read(prompts.reader(ParseOptions((), True, "c", tools=TOOLS_JSON)), sampled)
        expected = library.parse_response(sampled, tools=TOOLS, prompt_ids=prompt)
        assert answer.content == expected.content.strip()
        assert answer.reasoning == (expected.reasoning_content or "").strip()
        calls = [(call.name, json.loads(call.arguments)) for call in answer.tool_calls]
        assert calls == [(call.name, as_object(call.arguments)) for call in expected.tool_calls]
        assert len(calls) == num_calls


def read(reader: DeltaReader, sampled: list[int]) -> tuple[ParsedReply, int]:
    """Return a parser's answer, which its deltas add up to, and the number of deltas before the
    last.
    """
    deltas = [delta for i in sampled if (delta := reader.feed([i])) is not None]
    num_deltas = len(deltas)
    deltas.append(reader.end(len(sampled)))
    answer = reader.answer()
    assert "".join(delta.content for delta in deltas) == answer.content
    assert "".join(delta.reasoning for delta in deltas) == answer.reasoning
    pieces = [call for delta in deltas for call in delta.calls]
    for n, call in enumerate(answer.tool_calls):
        assert [p.name for p in pieces if p.index == n and p.id] == [call.name]
        assert "".join(p.arguments for p in pieces if p.index == n) == call.arguments
    return answer, num_deltas


@pytest.mark.parametrize("name", ["glm-5", "minimax-m2"])
@pytest.mark.parametrize("reads_calls", [True, False])
def test_text_before_a_call_is_streamed_as_it_is_sampled(
    name: str, reads_calls: bool, folder: Path, tokenizer: Tokenizer
) -> None:
    family = choose_family(folder, name, tokenizer)
    prompts = Prompts(family, tokenizer)
    markup = {
        "glm-5": "<tool_call>f<arg_key>s</arg_key><arg_value>x</arg_value></tool_call>",
        "minimax-m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="s">x</parameter>\n'
        "</invoke>\n</minimax:tool_call>",
    }[name]
    sampled = [
        *tokenizer.encode(f"hm, so</think>I will look{markup}"),
        prompts.stop_token_ids[0],
    ]
    answer, num_deltas = read(
        prompts.reader(ParseOptions((), reads_calls, "c", tools=TOOLS_JSON)), sampled
    )
    assert num_deltas > 10
    assert answer.reasoning == "hm, so"
    assert answer.content == "I will look" + ("" if reads_calls else markup)
    assert [(c.name, c.arguments) for c in answer.tool_calls] == [("f", '{"s": "x"}')] * reads_calls


def plain_reply(prompts: Prompts, tokenizer: Tokenizer, prompt: list[int]) -> list[int]:
    """Return a plain reply, after reasoning if the prompt or the family requires it."""
    text = tokenizer.decode(prompt)
    thought = "hm</think>" if text.rstrip().endswith("<think>") else ""
    thought = "<think>hm</think>" if text.endswith("<|assistant|>") else thought
    return [*tokenizer.encode(f"{thought}I guess 4"), prompts.stop_token_ids[0]]


def as_object(arguments: Any) -> Any:
    return json.loads(arguments) if isinstance(arguments, str) else arguments
