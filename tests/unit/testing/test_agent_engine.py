"""The scripted agent: what it says, in which tokens, and where it goes on."""

from pathlib import Path

import aiohttp
import orjson
import pytest

from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer
from rollmesh.testing.engine import AgentReply, ScriptedAgent, ScriptedEngine, ToolUse, steps
from rollmesh.testing.model_folder import write_model_folder

LOOK = AgentReply(
    "I look\u2026", reasoning="What is there?", uses=(ToolUse("bash", '{"command":  "ls"}'),)
)
DONE = AgentReply("All done, all fine.")
TITLE = AgentReply("A title")
TOOLS = "<|im_start|>system\n<tools>bash</tools><|im_end|>\n"
OPENING = "<|im_start|>user\nlook<|im_end|>\n<|im_start|>assistant\n"
LOOKED = (
    "<think>\nWhat is there?\n</think>\n\nI look\u2026\n"
    '<tool_call>\n{"name": "bash", "arguments": {"command":  "ls"}}\n</tool_call><|im_end|>'
)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    return load_tokenizer(write_model_folder(tmp_path, ["All done, all fine, I look, bash"] * 9))


@pytest.fixture
def agent(tokenizer: Tokenizer) -> ScriptedAgent:
    return ScriptedAgent(tokenizer, steps(LOOK, DONE, aside=TITLE))


def speak(agent: ScriptedAgent, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """The whole turn after `prompt`."""
    context = tokenizer.encode(prompt)
    num_before = len(context)
    while context[-1] != tokenizer.convert_tokens_to_ids("<|im_end|>"):
        context.append(agent.next_token(0, context))
    return context[num_before:]


def test_calls_come_in_their_marks_and_the_script_goes_on_after_each_result(
    agent: ScriptedAgent, tokenizer: Tokenizer
) -> None:
    first = speak(agent, tokenizer, TOOLS + OPENING)
    assert tokenizer.decode(first) == LOOKED
    assert tokenizer.convert_tokens_to_ids("<tool_call>") in first
    history = TOOLS + OPENING + LOOKED + "\n<|im_start|>user\na.txt<|im_end|>\n"
    second = speak(agent, tokenizer, history + "<|im_start|>assistant\n")
    assert tokenizer.decode(second) == "All done, all fine.<|im_end|>"


def test_no_tokenizer_would_cut_the_texts_so(agent: ScriptedAgent, tokenizer: Tokenizer) -> None:
    said = speak(agent, tokenizer, TOOLS + OPENING)
    assert said != tokenizer.encode(tokenizer.decode(said))


def test_a_scene_without_tools_is_an_aside(agent: ScriptedAgent, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(speak(agent, tokenizer, OPENING)) == "A title<|im_end|>"


def test_an_opened_call_is_closed_and_a_foreign_opening_ends_the_turn(
    agent: ScriptedAgent, tokenizer: Tokenizer
) -> None:
    whole = tokenizer.decode(speak(agent, tokenizer, TOOLS + OPENING))
    forced = speak(agent, tokenizer, TOOLS + OPENING + "<tool_call>")
    assert tokenizer.decode(forced) == whole.partition("<tool_call>")[2]
    assert tokenizer.decode(speak(agent, tokenizer, OPENING + "Zebra")) == "<|im_end|>"
    assert tokenizer.decode(speak(agent, tokenizer, "no chat")) == "<|im_end|>"


async def test_it_speaks_behind_a_real_generate(agent: ScriptedAgent, tokenizer: Tokenizer) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampling = {"max_new_tokens": 500, "stop_token_ids": [end]}
    body = {"rid": "r", "input_ids": tokenizer.encode(OPENING), "sampling_params": sampling}
    async with (
        ScriptedEngine(agent.next_token) as engine,
        aiohttp.ClientSession() as client,
        client.post(engine.url + "/generate", json=body) as response,
    ):
        answer = orjson.loads(await response.read())
    assert answer["output_ids"] == speak(agent, tokenizer, OPENING)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
