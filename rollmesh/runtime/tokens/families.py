"""Choose the renderer of a model's chats: a library family, or the folder's Jinja template.

- The renderer library is loaded without the openai SDK.
- With a template, replies are parsed like those of Qwen's models (`<think>`, `<tool_call>`), if
  these marks are single tokens of the vocabulary.
- A prompt has one placeholder for each image of its chat, in order. SGLang expands them by the
  model's processor, and so does the trainer. SGLang 0.5.21 with a tiny Qwen3-VL returns our ids
  except for that, and refuses ids that are expanded or a wrong number of images.
"""

import hashlib
import json
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec
import orjson

from rollmesh.core.errors import ConfigError, ModelError, SessionError
from rollmesh.runtime.chat import ROLES, ChatMessage, ContentPart
from rollmesh.runtime.tokens.tokenizer import Tokenizer
from rollmesh.runtime.tokens.tool_calls import CallStyle


class PlaceholderRenderer:
    """A multimodal renderer of the library as a Renderer, without its image processor."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        kinds: dict[int, int] = renderer.mm_token_type_id_map
        self.image_id = next(i for i, kind in kinds.items() if kind == 1)

    def render_ids(
        self, messages: list[Any], *, tools: list[Any] | None, add_generation_prompt: bool
    ) -> list[int]:
        """Token ids of the rendered chat."""
        rendered = self._renderer.render(
            messages,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            process_multimodal=False,
        )
        ids: list[int] = rendered.token_ids
        return ids

    def get_stop_token_ids(self) -> list[int]:
        """The ids that end a turn."""
        ids: list[int] = self._renderer.get_stop_token_ids()
        return ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None,
    ) -> Any:
        """See the library's method of this name."""
        return self._renderer.bridge_to_next_turn(
            previous_prompt_ids,
            previous_completion_ids,
            new_messages,
            tools=tools,
            process_multimodal=False,
        )


def with_images(message: ChatMessage) -> dict[str, Any]:
    """A message in the shape of multimodal renderers."""
    if not message.images():
        return message.for_template()
    assert isinstance(message.content, list)
    plain = ChatMessage(message.role, "", tool_call_id=message.tool_call_id)
    return {**plain.for_template(), "content": [_part(part) for part in message.content]}


def check_placeholders(
    token_ids: Sequence[int], messages: Sequence[ChatMessage], image_id: int
) -> None:
    """SessionError 400 unless images and placeholders match one to one."""
    num_images = sum([len(message.images()) for message in messages])
    num_places = token_ids.count(image_id)
    if num_places != num_images:
        roles = {ROLES[message.role] for message in messages if message.images()}
        where = f" (messages with images: {', '.join(sorted(roles))})" if roles else ""
        raise SessionError(
            400,
            "unsupported_content",
            f"{num_images} images are shown{where}, but this model's chat format has a place for "
            f"{num_places}: only users and tools can show images, and text has no placeholders",
        )


def check_sampled(sampled_ids: Sequence[int], image_id: int) -> None:
    """SessionError 400 if a turn to continue from has a placeholder without an image.

    A model may sample the placeholder like any token. It is trained as one; but in a prompt neither
    an engine nor a trainer's processor could distinguish it from the place of an image.
    """
    if image_id in sampled_ids:
        raise SessionError(
            400,
            "unsupported_content",
            "the model wrote an image placeholder in an earlier turn, and engines could not "
            "distinguish it from the place of an image: continue without that turn",
        )


def _part(part: ContentPart | str) -> dict[str, Any]:
    if isinstance(part, ContentPart) and part.image is not None:
        return {"type": "image"}
    return {"type": "text", "text": part if isinstance(part, str) else part.plain_text() or ""}


_OPENS_REASONING = re.compile(r"assistant(\\n|\n)<think>(\\n|\n)['\"]")
"""The end of a template's string that opens reasoning, with line breaks escaped or not."""


class TemplateRenderer:
    """Renders by a folder's chat template; implements Renderer."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        import jinja2.sandbox  # noqa: PLC0415 - 10 MB that known families do not need

        settings = _read_json(folder / "tokenizer_config.json")
        source = _template_source(folder, settings)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        self.style = CallStyle.XML if "<function=" in source else CallStyle.JSON
        """The call style that the template shows the model."""
        self._faults = jinja2.TemplateError
        try:
            self._template = environment.from_string(source)
        except self._faults as error:
            raise ModelError(
                f"{folder}: its chat template is not valid Jinja: {error}; name a family in "
                "model.renderer, such as qwen3"
            ) from None
        self._tokenizer = tokenizer
        self._specials = {
            key: text
            for key in ("bos_token", "eos_token", "pad_token", "unk_token")
            if (text := _token_text(settings.get(key)))
        }
        self._stop_ids = _stop_ids(folder, tokenizer, self._specials.get("eos_token", ""))

    def render_ids(
        self,
        messages: list[Any],
        *,
        tools: list[Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> list[int]:
        """Token ids of the rendered chat; SessionError 400 if the template refuses it."""
        try:
            text = self._template.render(
                messages=messages,
                tools=tools or None,
                add_generation_prompt=add_generation_prompt,
                **self._specials,
            )
        except (self._faults, TypeError, ValueError, KeyError, AttributeError) as error:
            raise SessionError(
                400,
                "invalid_messages",
                f"the model's chat template refuses these messages: {error}",
            ) from None
        return self._tokenizer.encode(text)

    def get_stop_token_ids(self) -> list[int]:
        """The ids that end a turn."""
        return self._stop_ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> None:
        """None: an arbitrary template cannot be bridged."""
        del previous_prompt_ids, previous_completion_ids, new_messages, tools


def opens_reasoning(folder: Path) -> bool:
    """Whether the folder's template ends each prompt with an open `<think>`.

    Models that always reason share a model type with those that may reason, and differ in this.
    """
    settings = _read_json(folder / "tokenizer_config.json")
    return _OPENS_REASONING.search(_find_source(folder, settings)) is not None


def template_digest(folder: Path) -> str:
    """Digest of the folder's template."""
    source = _find_source(folder, _read_json(folder / "tokenizer_config.json"))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def _template_source(folder: Path, settings: dict[str, Any]) -> str:
    source = _find_source(folder, settings)
    if not source:
        raise ModelError(
            f"{folder}: no chat template in it; name a family in model.renderer, such as qwen3"
        )
    return source


def _find_source(folder: Path, settings: dict[str, Any]) -> str:
    beside = folder / "chat_template.jinja"
    source = beside.read_text() if beside.is_file() else settings.get("chat_template")
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source}
        source = named.get("default")
    return source if isinstance(source, str) else ""


def _stop_ids(folder: Path, tokenizer: Tokenizer, eos_token: str) -> list[int]:
    """End-of-turn ids: those of the generation config, and the tokenizer's own."""
    eos = _read_json(folder / "generation_config.json").get("eos_token_id", [])
    ids = list(eos) if isinstance(eos, list) else [eos]
    own = tokenizer.convert_tokens_to_ids(eos_token) if eos_token else None
    if own is not None and own not in ids:
        ids.append(own)
    return [int(i) for i in ids if i is not None]


def _token_text(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        tree = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    return tree if isinstance(tree, dict) else {}


def _tojson(value: Any, indent: int | None = None, **_: Any) -> str:
    # Templates expect the spacing of the standard library.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)


FAMILY_OF_MODEL_TYPE = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_vl": "qwen3-vl",
    "qwen3_vl_moe": "qwen3-vl",
    "gpt_oss": "gpt-oss",
}
"""Families by `model_type` of config.json, if all published models of the type share a chat format;
those that always reason do not, see opens_reasoning."""
IMAGE_FAMILIES = ("qwen3-vl",)
"""Families whose images SGLang accepts together with exact token ids."""


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
"""Families with marks of one token; replies of others are parsed when they end (parsers.py)."""
CALL_OPENING_OF_FAMILY = {
    "glm-5": "<tool_call>",
    "glm-5.1": "<tool_call>",
    "glm-5.3": "<tool_call>",
    "minimax-m2": "<minimax:tool_call>",
}
"""Other families, whose replies begin in reasoning up to `</think>` and open calls with this
token."""


class Renderer(Protocol):
    """The methods that are used of the library's renderers; see its documentation."""

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
    """The library's parser of a family's replies."""

    def get_stop_token_ids(self) -> list[int]: ...

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None, prompt_ids: list[int] | None
    ) -> Any: ...


class Family(msgspec.Struct, frozen=True):
    """A renderer and the properties of its format."""

    renderer: Renderer
    style: CallStyle | Parser
    """The style of tool calls, if reasoning and calls are between single `<think>` and
    `<tool_call>` tokens; else the parser of replies."""
    call_opening: str = ""
    """The token before which replies of such a parser can be streamed; empty if it is not known."""
    is_framed: bool = False
    """Its messages are texts in Qwen3's fixed frames (prompts.py)."""
    image_id: int | None = None
    """The placeholder of an image; None if the format or the engine has only text."""


def choose_family(folder: Path, name: str, tokenizer: Tokenizer) -> Family:
    """The renderer of a setting: `auto`, `template`, or a family of the library.

    ConfigError for an unknown name, ModelError if the folder lacks what the choice needs.
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
        # The direct import keeps about thirty other families out of the process.
        renderer: Any = (
            library.Qwen3Renderer(tokenizer, config)
            if name == "qwen3"
            else library.create_renderer(tokenizer, config)
        )
    except Exception as error:  # noqa: BLE001 - door: some families fetch files, which may fail in any way
        raise ModelError(
            f"{folder}: the renderer {name!r} cannot be created for its tokenizer: {error}; "
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
    """Make a library renderer refuse to load an image processor.

    Some families load it with `trust_remote_code=True`, which runs code of the model's folder.
    """

    def refused() -> Any:
        raise ModelError("images: this family's processor would run code of the model's folder")

    if hasattr(renderer, "_get_processor"):
        setattr(renderer, "_get_processor", refused)  # noqa: B010 - private in the library: there is no setting


def chats_of(folder: Path, name: str) -> str:
    """Identity of a folder's chat format: the family, or `template` and the digest of the
    template."""
    name = _resolved(folder, name)
    return f"{name}:{template_digest(folder)}" if name == "template" else name


def _resolved(folder: Path, name: str) -> str:
    """The name that `auto` resolves to: `template`, or a family."""
    if name == "auto":
        name = FAMILY_OF_MODEL_TYPE.get(_model_type(folder), "template")
        name = "template" if opens_reasoning(folder) else name
    return name


def _model_type(folder: Path) -> str:
    try:
        return str(orjson.loads((folder / "config.json").read_bytes()).get("model_type", ""))
    except (OSError, orjson.JSONDecodeError, AttributeError):
        raise ModelError(
            f"{folder}: no readable config.json; model.path must be a model folder"
        ) from None


def _import_renderers() -> Any:
    """Import the library without the openai SDK, which its HTTP client imports.

    That client is not used here, and the SDK costs half a second and 15 MB in every worker. A stub
    replaces it during the import only; later imports of openai get the real one.
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
