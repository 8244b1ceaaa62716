"""Renderers of model folders: choice of the family, templates, image placeholders, light
imports."""

import base64
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import renderers
from renderers.kimi_k25 import KimiK25Renderer

from rollmesh.core.errors import ConfigError, ModelError, SessionError
from rollmesh.runtime.chat import read_message
from rollmesh.runtime.tokens.families import (
    TemplateRenderer,
    chats_of,
    choose_family,
    refuse_processors,
)
from rollmesh.runtime.tokens.prompts import Chat, Prompts
from rollmesh.runtime.tokens.tokenizer import Tokenizer, load_tokenizer
from rollmesh.runtime.tokens.tool_calls import CallStyle
from rollmesh.testing.model_folder import write_large_folder, write_model_folder

OWN_TEMPLATE = "{{ 'own template: ' }}{{ messages[0].content }}"
OWN_PROMPT = "own template: hello"
QWEN_PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def prompt_of(folder: Path, name: str = "auto") -> str:
    """Return the text of a short chat in the format chosen for a folder."""
    tokenizer = load_tokenizer(folder)
    renderer = choose_family(folder, name, tokenizer).renderer
    chat = [{"role": "user", "content": "hello"}]
    return tokenizer.decode(renderer.render_ids(chat, tools=None, add_generation_prompt=True))


def test_chats_of_a_known_model_type_are_in_its_familys_format(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, model_type="qwen3", chat_template=OWN_TEMPLATE)
    assert prompt_of(folder) == prompt_of(folder, "qwen3") == QWEN_PROMPT
    assert prompt_of(folder, "template") == OWN_PROMPT


def test_chats_of_an_unknown_model_type_are_in_the_folders_own_format(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, model_type="unknown", chat_template=OWN_TEMPLATE)
    assert prompt_of(folder) == OWN_PROMPT


def test_a_family_never_runs_a_processors_code_from_the_folder() -> None:
    renderer = KimiK25Renderer.__new__(KimiK25Renderer)
    refuse_processors(renderer)
    with pytest.raises(ModelError, match="would run code"):
        renderer._get_processor()  # noqa: SLF001 - called by the library


def test_an_unknown_family_is_refused_by_name(model_folder: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"model\.renderer: no family 'gwen'"):
        choose_family(model_folder, "gwen", tokenizer)


@pytest.mark.parametrize("fault", [AssertionError, RuntimeError, OSError])
def test_a_family_that_cannot_be_loaded_is_a_one_line_error(
    model_folder: Path,
    tokenizer: Tokenizer,
    fault: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetch(*_: object) -> None:
        raise fault("no such vocabulary")

    monkeypatch.setattr(renderers, "create_renderer", fetch)
    with pytest.raises(ModelError, match=r"renderer 'gpt-oss' .* no such vocabulary; set model"):
        choose_family(model_folder, "gpt-oss", tokenizer)


def test_a_folder_without_a_config_is_refused(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelError, match=r"no readable config\.json"):
        choose_family(tmp_path, "auto", tokenizer)


def test_the_library_is_loaded_without_the_openai_sdk(model_folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path;"
        "from rollmesh.runtime.tokens.families import choose_family;"
        "from rollmesh.runtime.tokens.tokenizer import load_tokenizer;"
        f"folder = Path({str(model_folder)!r});"
        "choose_family(folder, 'auto', load_tokenizer(folder));"
        "heavy = {'openai', 'torch', 'transformers', 'numpy', 'jinja2'} & set(sys.modules);"
        "assert not heavy, heavy; import openai; assert openai.AsyncOpenAI is not object"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


THINKS = "{{ '<|im_start|>assistant\\n<think>\\n' }}"
MAY_THINK = "{{ '<|im_start|>assistant\\n' }}{{ '<think>\\n\\n</think>\\n\\n' }}"


@pytest.mark.parametrize(
    ("template", "prompt"),
    [(THINKS, "<|im_start|>assistant\n<think>\n"), (MAY_THINK, QWEN_PROMPT)],
)
def test_chats_of_a_model_that_always_reasons_are_in_its_own_format(
    tmp_path: Path, template: str, prompt: str
) -> None:
    folder = write_model_folder(tmp_path, model_type="qwen3", chat_template=template)
    assert prompt_of(folder) == prompt


def test_calls_are_parsed_as_xml_if_the_template_writes_xml(tmp_path: Path) -> None:
    source = "{{ '<function=f>' }}{{ messages[0].content }}"
    folder = write_model_folder(tmp_path, model_type="unknown", chat_template=source)
    assert choose_family(folder, "auto", load_tokenizer(folder)).style is CallStyle.XML


def test_the_chat_format_is_identified_by_its_family_or_its_template(
    model_folder: Path, tmp_path: Path
) -> None:
    assert chats_of(model_folder, "auto") == chats_of(model_folder, "qwen3") == "qwen3"
    own, other = (
        chats_of(write_model_folder(tmp_path / template, chat_template=template), "template")
        for template in ("a", "b")
    )
    assert own.startswith("template:")
    assert own != other
    assert own == chats_of(tmp_path / "a", "template")


CHAT: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]


def test_a_chat_is_encoded_as_the_template_writes_it(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    renderer = TemplateRenderer(model_folder, tokenizer)
    ids = renderer.render_ids(CHAT, add_generation_prompt=True)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_turns_end_at_the_ids_of_the_generation_config(
    model_folder: Path, tokenizer: Tokenizer
) -> None:
    ids = TemplateRenderer(model_folder, tokenizer).get_stop_token_ids()
    assert [tokenizer.decode(i) for i in ids] == ["<|im_end|>", "<|endoftext|>"]


def test_an_error_of_the_template_is_a_400_with_its_message(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    folder = write_model_folder(tmp_path, chat_template=template)
    renderer = TemplateRenderer(folder, load_tokenizer(folder))
    with pytest.raises(SessionError, match="roles must alternate") as caught:
        renderer.render_ids(CHAT)
    assert caught.value.status == 400


def test_a_folder_without_a_template_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no chat template in it; name a family"):
        TemplateRenderer(folder, load_tokenizer(folder))


END = "<|im_end|>"


def image(data: bytes) -> dict[str, object]:
    address = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": address}}


def text(content: str) -> dict[str, object]:
    return {"type": "text", "text": content}


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


def test_an_image_is_one_placeholder_between_its_markers(
    vl_prompts: Prompts, vl_tokenizer: Tokenizer
) -> None:
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    assert vl_tokenizer.decode(vl_prompts.first(chat(SEES))) == (
        f"<|im_start|>user\nwhat is {shown}{shown}?{END}\n<|im_start|>assistant\n"
    )


def test_a_screenshot_extends_the_sampled_tokens(
    vl_prompts: Prompts, vl_tokenizer: Tokenizer
) -> None:
    first = vl_prompts.first(chat(SEES))
    sampled = vl_tokenizer.encode(f"a cat{END}")
    extension = vl_prompts.extend(sampled, chat(SHOT))
    assert extension is not None
    whole = vl_prompts.first(chat(SEES, {"role": "assistant", "content": "a cat"}, SHOT))
    assert [*first, *sampled, *extension] == list(whole)
    assert vl_tokenizer.decode(extension).count("<|image_pad|>") == 1


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "look: <|image_pad|>"},
        {"role": "system", "content": [text("see"), image(b"one")]},
        {"role": "assistant", "content": [text("see"), image(b"one")]},
    ],
)
def test_images_in_other_roles_or_parts_are_refused(
    vl_prompts: Prompts, message: Mapping[str, object]
) -> None:
    with pytest.raises(SessionError, match=r"images are shown.* has a place for") as caught:
        vl_prompts.first(chat(message, SEES))
    assert (caught.value.status, caught.value.code) == (400, "unsupported_content")


def test_a_turn_with_a_sampled_placeholder_is_not_extended(
    vl_prompts: Prompts, vl_tokenizer: Tokenizer
) -> None:
    """SGLang would search for one image more than there are, and answer 500 from then on."""
    sampled = vl_tokenizer.encode(f"a <|image_pad|> cat{END}")
    for new in (SHOT, {"role": "user", "content": "go on"}):
        with pytest.raises(SessionError, match="the model wrote an image placeholder") as caught:
            vl_prompts.extend(sampled, chat(new))
        assert (caught.value.status, caught.value.code) == (400, "unsupported_content")


@pytest.mark.parametrize("which", ["prompts", "template_prompts"])
def test_a_text_model_refuses_images(which: str, request: pytest.FixtureRequest) -> None:
    prompts: Prompts = request.getfixturevalue(which)
    with pytest.raises(SessionError, match="reads text only") as caught:
        prompts.first(chat(SEES))
    assert (caught.value.status, caught.value.code) == (400, "unsupported_content")
