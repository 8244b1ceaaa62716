"""Chats with images have one placeholder for each, and text-only models say that they have none."""

import base64
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import read_message
from rollmesh.runtime.families import choose_family
from rollmesh.runtime.prompts import Chat, Prompts
from rollmesh.runtime.tokenizer import Tokenizer, load_tokenizer
from rollmesh.testing.model_folder import write_large_folder

END = "<|im_end|>"


def image(data: bytes) -> dict[str, object]:
    address = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": address}}


def text(said: str) -> dict[str, object]:
    return {"type": "text", "text": said}


def chat(*messages: Mapping[str, object]) -> Chat:
    raws = [msgspec.json.encode(message) for message in messages]
    return Chat(raws, [read_message(raw, n) for n, raw in enumerate(raws)], b"")


SEES = {"role": "user", "content": [text("what is "), image(b"one"), image(b"two"), text("?")]}
SHOT = {"role": "tool", "tool_call_id": "c", "content": [text("done"), image(b"three")]}


@pytest.fixture(scope="module")
def vl_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(write_large_folder(tmp_path_factory.mktemp("vl"), "qwen3_vl"))


@pytest.fixture(scope="module")
def vl_prompts(vl_tokenizer: Tokenizer) -> Prompts:
    return Prompts(
        choose_family(Path(vl_tokenizer.name_or_path), "auto", vl_tokenizer), vl_tokenizer
    )


def test_an_image_is_one_placeholder_between_its_marks(
    vl_prompts: Prompts, vl_tokenizer: Tokenizer
) -> None:
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    assert vl_tokenizer.decode(vl_prompts.first(chat(SEES))) == (
        f"<|im_start|>user\nwhat is {shown}{shown}?{END}\n<|im_start|>assistant\n"
    )


def test_a_screenshot_extends_what_was_sampled(
    vl_prompts: Prompts, vl_tokenizer: Tokenizer
) -> None:
    first = vl_prompts.first(chat(SEES))
    said = vl_tokenizer.encode(f"a cat{END}")
    extension = vl_prompts.extend(said, chat(SHOT))
    assert extension is not None
    whole = vl_prompts.first(chat(SEES, {"role": "assistant", "content": "a cat"}, SHOT))
    assert [*first, *said, *extension] == list(whole)
    assert vl_tokenizer.decode(extension).count("<|image_pad|>") == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "look: <|image_pad|>"},
        {"role": "system", "content": [text("see"), image(b"one")]},
        {"role": "assistant", "content": [text("see"), image(b"one")]},
    ],
)
def test_what_has_no_place_is_refused(vl_prompts: Prompts, message: Mapping[str, object]) -> None:
    with pytest.raises(SessionError, match=r"images are shown.* has a place for") as caught:
        vl_prompts.first(chat(message, SEES))
    assert (caught.value.status, caught.value.code) == (400, "unsupported_content")


def test_a_turn_in_which_the_model_wrote_the_mark_itself_is_not_gone_on_from(
    vl_prompts: Prompts, vl_tokenizer: Tokenizer
) -> None:
    """SGLang would look for one image more than there are and answer 500 from then on."""
    said = vl_tokenizer.encode(f"a <|image_pad|> cat{END}")
    for new in (SHOT, {"role": "user", "content": "go on"}):
        with pytest.raises(SessionError, match="the model wrote an image placeholder") as caught:
            vl_prompts.extend(said, chat(new))
        assert (caught.value.status, caught.value.code) == (400, "unsupported_content")


@pytest.mark.parametrize("which", ["prompts", "template_prompts"])
def test_a_model_of_text_says_so(which: str, request: pytest.FixtureRequest) -> None:
    prompts: Prompts = request.getfixturevalue(which)
    with pytest.raises(SessionError, match="reads text only") as caught:
        prompts.first(chat(SEES))
    assert (caught.value.status, caught.value.code) == (400, "unsupported_content")
