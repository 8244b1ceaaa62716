"""The scripted agent: its texts, their tokens, and its place in the script."""

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


def turn_of(agent: ScriptedAgent, tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Return the tokens of the agent's turn after `prompt`."""
    context = tokenizer.encode(prompt)
    num_before = len(context)
    while context[-1] != tokenizer.convert_tokens_to_ids("<|im_end|>"):
        context.append(agent.next_token(0, context))
    return context[num_before:]


def test_tool_calls_have_their_markers_and_the_script_continues_after_each_result(
    agent: ScriptedAgent, tokenizer: Tokenizer
) -> None:
    first = turn_of(agent, tokenizer, TOOLS + OPENING)
    assert tokenizer.decode(first) == LOOKED
    assert tokenizer.convert_tokens_to_ids("<tool_call>") in first
    history = TOOLS + OPENING + LOOKED + "\n<|im_start|>user\na.txt<|im_end|>\n"
    second = turn_of(agent, tokenizer, history + "<|im_start|>assistant\n")
    assert tokenizer.decode(second) == "All done, all fine.<|im_end|>"


def test_the_agents_tokens_are_not_those_of_the_tokenizer(
    agent: ScriptedAgent, tokenizer: Tokenizer
) -> None:
    token_ids = turn_of(agent, tokenizer, TOOLS + OPENING)
    assert token_ids != tokenizer.encode(tokenizer.decode(token_ids))


def test_a_conversation_without_tools_gets_the_aside(
    agent: ScriptedAgent, tokenizer: Tokenizer
) -> None:
    assert tokenizer.decode(turn_of(agent, tokenizer, OPENING)) == "A title<|im_end|>"


def test_an_open_call_is_completed_and_an_unknown_prefix_ends_the_turn(
    agent: ScriptedAgent, tokenizer: Tokenizer
) -> None:
    whole = tokenizer.decode(turn_of(agent, tokenizer, TOOLS + OPENING))
    forced = turn_of(agent, tokenizer, TOOLS + OPENING + "<tool_call>")
    assert tokenizer.decode(forced) == whole.partition("<tool_call>")[2]
    assert tokenizer.decode(turn_of(agent, tokenizer, OPENING + "Zebra")) == "<|im_end|>"
    assert tokenizer.decode(turn_of(agent, tokenizer, "no chat")) == "<|im_end|>"


async def test_the_agent_answers_through_a_scripted_engine(
    agent: ScriptedAgent, tokenizer: Tokenizer
) -> None:
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sampling = {"max_new_tokens": 500, "stop_token_ids": [end]}
    body = {"rid": "r", "input_ids": tokenizer.encode(OPENING), "sampling_params": sampling}
    async with (
        ScriptedEngine(agent.next_token) as engine,
        aiohttp.ClientSession() as client,
        client.post(engine.url + "/generate", json=body) as response,
    ):
        answer = orjson.loads(await response.read())
    assert answer["output_ids"] == turn_of(agent, tokenizer, OPENING)
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
