"""The contract of images: a gateway in front of a real SGLang that serves a vision model.

The embedded engine has no such model. Samples of a session are compared with the engine itself,
which replaces the placeholders by the images and must score each sampled token as recorded.
"""

from collections.abc import AsyncIterator, Iterator
from typing import NamedTuple

import httpx
import pytest
from tokenizers import Tokenizer

from tests.contract.conftest import NOT_INSTALLED
from tests.contract.engines import WAIT_S, EngineUnderContract, Json
from tests.contract.processes import SGLANG_INSTALLED, gateway, sglang_engine
from tests.contract.test_gateway import CHAT, RunningGateway
from tests.contract.vision_model import picture, write_seeing_model

RED, WIDE, SMALL = (
    picture(64, 64, (255, 0, 0)),
    picture(160, 64, (0, 0, 255)),
    picture(32, 32, (0, 255, 0)),
)
LARGE = picture(400, 400, (9, 9, 9))
"""Thirty of these are longer than the context."""
INCREMENTAL = "--incremental-streaming-output"
NUM_TOKENS = {RED: 4, WIDE: 10, SMALL: 1}


class Sight(NamedTuple):
    """A vision engine, and the gateway in front of it."""

    address: str
    door: RunningGateway
    place: int
    """The placeholder token of an image."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param([], marks=pytest.mark.sglang, id="sglang"),
        pytest.param([INCREMENTAL], marks=pytest.mark.sglang, id="sglang_incremental"),
    ],
)
def sight(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sight]:
    """With its cache of prefixes."""
    if not SGLANG_INSTALLED.exists():
        pytest.skip(NOT_INSTALLED)
    folder = write_seeing_model(tmp_path_factory.mktemp("models") / "seeing")
    token_file = tmp_path_factory.mktemp("gateway") / "token"
    with (
        sglang_engine(folder, *request.param) as engine,
        gateway([engine.address], folder, token_file) as process,
    ):
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        place = tokenizer.token_to_id("<|image_pad|>")
        assert place is not None
        yield Sight(engine.address, RunningGateway(process, token_file), place)


@pytest.fixture
async def engine(sight: Sight) -> AsyncIterator[EngineUnderContract]:
    limits = httpx.Limits(max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=sight.address, timeout=WAIT_S, limits=limits) as client:
        yield EngineUnderContract(
            client, "", is_incremental=False
        )  # it gets requests for whole answers only


def show(*parts: str) -> list[Json]:
    """A message content of texts and images."""
    return [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith(("data:", "http"))
        else {"type": "text", "text": part}
        for part in parts
    ]


async def assert_engine_sees_alike(engine: EngineUnderContract, account: Json, place: int) -> int:
    """Check the engine's scores of the sampled tokens, with images in place of `place`; return
    their number.
    """
    num_sampled = 0
    for sample in account["samples"]:
        shown = [account["images"][digest] for digest in sample["images"]]
        answer = await engine.generate(
            sample["token_ids"],
            image_data=shown,
            sampling_params={"max_new_tokens": 0},
            return_logprob=True,
            logprob_start_len=0,
        )
        entries = iter(answer["meta_info"]["input_token_logprobs"])
        images = iter(shown)
        for at, token_id in enumerate(sample["token_ids"]):
            scored, seen, _ = next(entries)
            if token_id == place:
                for _ in range(NUM_TOKENS[next(images)] - 1):
                    next(entries)
                continue
            assert seen == token_id
            if sample["loss_mask"][at]:
                assert sample["logprobs"][at] == pytest.approx(scored, abs=2e-3)
                num_sampled += 1
        assert list(entries) == list(images) == []
    return num_sampled


@pytest.mark.parametrize("is_stream", [False, True])
async def test_samples_after_a_screenshot_at_every_turn_are_recorded_exactly(
    engine: EngineUnderContract, sight: Sight, is_stream: bool
) -> None:
    caller = await sight.door.session()
    talk: list[Json] = [{"role": "user", "content": show("compare", RED, WIDE, "these")}]
    for shown in (SMALL, RED, WIDE):
        body: Json = {"messages": talk, "max_tokens": 6}
        if is_stream:
            choices = [each["choices"] for each in await caller.stream(CHAT, **body)]
            deltas = [choice["delta"] for each in choices for choice in each]
            content = "".join(delta.get("content") or "" for delta in deltas)
        else:
            content = (await caller.ask(CHAT, **body))["choices"][0]["message"]["content"]
        talk += [{"role": "assistant", "content": content}]
        talk += [{"role": "user", "content": show("and now", shown)}]
    account = await caller.account()
    assert (account["forks"], len(account["samples"])) == ([], 1)
    assert len(account["samples"][0]["images"]) == 4
    assert await assert_engine_sees_alike(engine, account, sight.place) == 3 * 6
    await caller.client.aclose()


async def test_different_images_give_different_logprobs(sight: Sight) -> None:
    logprobs: list[list[float]] = []
    for picture_of in (RED, WIDE):
        caller = await sight.door.session(seed=5)
        content = show("look", picture_of)
        body: Json = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        await caller.ask(CHAT, **body)
        logprobs.append((await caller.samples())[0]["logprobs"][-1:])
        await caller.client.aclose()
    assert logprobs[0] != logprobs[1]


async def test_a_context_that_images_fill_is_reported_as_full(sight: Sight) -> None:
    caller = await sight.door.session()
    body: Json = {"messages": [{"role": "user", "content": show(*[LARGE] * 30)}]}
    response = await caller.client.post("/v1/chat/completions", json=body)
    assert (response.status_code, response.json()["error"]["code"]) == (
        400,
        "context_length_exceeded",
    )
    await caller.client.aclose()


@pytest.mark.parametrize(
    ("shown", "status"), [("data:image/png;base64,aGk=", 400), ("http://127.0.0.1:1/a.png", 503)]
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_image_that_the_engine_cannot_open_fails_only_its_call(
    sight: Sight, is_stream: bool, shown: str, status: int
) -> None:
    caller = await sight.door.session()
    body: Json = {"stream": is_stream, "messages": [{"role": "user", "content": show(shown)}]}
    response = await caller.client.post("/v1/chat/completions", json=body)
    assert response.status_code == status
    health = (await caller.client.get("/healthz")).json()
    assert [engine["phase"] for engine in health["engines"]] == ["ready"]
    answer = await caller.ask(CHAT, messages=[{"role": "user", "content": show(RED)}], max_tokens=1)
    assert answer["usage"]["completion_tokens"] == 1
    await caller.client.aclose()
