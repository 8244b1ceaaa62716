"""Which renderer a model's chats go through, and how that library is loaded into a slim process.

Owns the choice: a family of the library renderers by name or by the model's type, else the
folder's own chat template. Invariant: a worker never loads the openai SDK on the library's behalf.
Driven by prompts.py, once per process.
"""

import sys
import types
from pathlib import Path
from typing import Any, Protocol

import msgspec
import orjson

from rollmesh.core.errors import ConfigError, ModelError
from rollmesh.runtime.calls import CallStyle
from rollmesh.runtime.templates import TemplateRenderer, opens_reasoning, template_digest
from rollmesh.runtime.tokenizer import Tokenizer
from rollmesh.runtime.vision import PlaceholderRenderer

FAMILY_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_vl": "qwen3-vl",
    "qwen3_vl_moe": "qwen3-vl",
    "gpt_oss": "gpt-oss",
}
"""`model_type` of config.json where the published models of the type share one chat format; those
that always think do not, see opens_reasoning."""
IMAGE_FAMILIES = ("qwen3-vl",)
"""Those whose images SGLang takes beside exact token ids (vision.py)."""


STYLE_OF_FAMILY = {
    "qwen3": CallStyle.JSON,
    "qwen3-vl": CallStyle.JSON,
    "prime-qwen3": CallStyle.XML,
    "qwen3.5": CallStyle.XML,
    "qwen3.6": CallStyle.XML,
    "qwen3.8": CallStyle.XML,
    "nemotron-3": CallStyle.XML,
    "nemotron-3-ultra": CallStyle.XML,
    "nemotron-3.5": CallStyle.XML,
}
"""Families that frame by marks; the others are parsed when their replies have ended (parsed.py)."""
CALL_OPENING_OF_FAMILY = {
    "glm-5": "<tool_call>",
    "glm-5.1": "<tool_call>",
    "glm-5.3": "<tool_call>",
    "minimax-m2": "<minimax:tool_call>",
}
"""Of the others, those whose replies begin in reasoning, up to `</think>`, and open calls so."""


class Renderer(Protocol):
    """What we use of the library renderers; its docs have the meanings."""

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None, add_generation_prompt: bool
    ) -> list[int]: ...

    def get_stop_token_ids(self) -> list[int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None,
    ) -> Any: ...


class Parser(Protocol):
    """What the library knows of a family's replies."""

    def get_stop_token_ids(self) -> list[int]: ...

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None, prompt_ids: list[int] | None
    ) -> Any: ...


class Family(msgspec.Struct, frozen=True):
    """A renderer and what we know of its format."""

    renderer: Renderer
    style: CallStyle | Parser
    """How it writes calls, where reasoning and calls stand between single `<think>` and
    `<tool_call>` tokens; else who can read it."""
    call_opening: str = ""
    """The token before which replies need no parser, if they need one; empty if it is not known."""
    is_framed: bool = False
    """Its messages are texts in Qwen3's fixed frames (frames.py)."""
    image_id: int | None = None
    """The placeholder of an image; None where the format, or the engine, has texts only."""


def choose_family(folder: Path, name: str, tokenizer: Tokenizer) -> Family:
    """The renderer that `name` asks for: `auto`, `template`, or a family of the library.

    ConfigError on an unknown name, ModelError if the folder lacks what the choice needs.
    """
    name = _resolved(folder, name)
    if name == "template":
        template = TemplateRenderer(folder, tokenizer)
        return Family(template, template.style)
    library = _import_renderers()
    try:
        config = library.config_from_name(name).model_copy(update={"thinking_retention": "all"})
    except (ValueError, KeyError, AttributeError):
        raise ConfigError(
            f"model.renderer: no family {name!r} in the library renderers; "
            "`auto` and `template` always work"
        ) from None
    try:
        # The direct import keeps some thirty other families out of the process.
        renderer: Any = (
            library.Qwen3Renderer(tokenizer, config)
            if name == "qwen3"
            else library.create_renderer(tokenizer, config)
        )
    except Exception as error:  # noqa: BLE001 - door: some families fetch files when they are made
        raise ModelError(
            f"{folder}: the renderer {name!r} cannot be made for its tokenizer: {error}; "
            'set model.renderer = "template"'
        ) from None
    style = STYLE_OF_FAMILY.get(name, renderer)
    if name in IMAGE_FAMILIES:
        placing = PlaceholderRenderer(renderer)
        return Family(placing, style, image_id=placing.image_id)
    refuse_processors(renderer)
    opening = CALL_OPENING_OF_FAMILY.get(name, "")
    return Family(renderer, style, opening, is_framed=name == "qwen3")


def refuse_processors(renderer: Any) -> None:
    """Make a renderer of the library refuse to load an image processor.

    Some families load it with `trust_remote_code=True`, which runs code of the model's folder.
    """

    def refused() -> Any:
        raise ModelError("images: this family's processor would run code of the model's folder")

    if hasattr(renderer, "_get_processor"):
        setattr(renderer, "_get_processor", refused)  # noqa: B010 - private there: no setting


def chats_of(folder: Path, name: str) -> str:
    """What makes prompts of chats and reads answers, where `name` is asked for: the family, or
    `template` and a digest of the folder's own."""
    name = _resolved(folder, name)
    return f"{name}:{template_digest(folder)}" if name == "template" else name


def _resolved(folder: Path, name: str) -> str:
    """`template`, or a family's name."""
    if name == "auto":
        name = FAMILY_OF_MODEL_TYPE.get(_model_type(folder), "template")
        name = "template" if opens_reasoning(folder) else name
    return name


def _model_type(folder: Path) -> str:
    try:
        return str(orjson.loads((folder / "config.json").read_bytes()).get("model_type", ""))
    except (OSError, orjson.JSONDecodeError, AttributeError):
        raise ModelError(
            f"{folder}: no readable config.json; model.path wants a model folder"
        ) from None


def _import_renderers() -> Any:
    """The library, without the openai SDK that its HTTP client imports at load.

    That client is not used here, and the SDK costs half a second and 15 MB in every worker. A stub
    stands in for the moment of the import and goes; later imports of openai get the real one.
    """
    if "openai" in sys.modules or "renderers" in sys.modules:
        import renderers  # noqa: PLC0415 - heavy, see above

        return renderers
    stub = types.ModuleType("openai")
    stub.__dict__["AsyncOpenAI"] = object
    sys.modules["openai"] = stub
    try:
        import renderers  # noqa: PLC0415 - must be imported under the stub
    finally:
        del sys.modules["openai"]
    return renderers
