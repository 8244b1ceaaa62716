"""Chats through a model folder's own Jinja chat template, for families without a renderer.

Owns the compiled template. Invariant: token ids come from the rendered text alone. What such a
model says is read as Qwen's models write it, where the vocabulary has those marks as single tokens:
reasoning in `<think>`, calls in `<tool_call>`, as JSON or, if the template shows it so, as XML. It
never bridges: prompts.py renders the new messages behind a fixed prefix instead. Driven by
prompts.py.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import orjson

from rollmesh.core.errors import ModelError, SessionError
from rollmesh.runtime.calls import CallStyle
from rollmesh.runtime.tokenizer import Tokenizer

_OPENS_REASONING = re.compile(r"assistant(\\n|\n)<think>(\\n|\n)['\"]")
"""As templates spell it: the end of a string, its line breaks escaped or not."""


class TemplateRenderer:
    """Satisfies families.Renderer for any folder that has a chat template."""

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        import jinja2.sandbox  # noqa: PLC0415 - 10 MB that known families do without

        settings = _read_json(folder / "tokenizer_config.json")
        source = _template_source(folder, settings)
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        self.style = CallStyle.XML if "<function=" in source else CallStyle.JSON
        """By what the template shows the model."""
        self._template = environment.from_string(source)
        self._faults = jinja2.TemplateError
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
        """Token ids of the rendered chat; SessionError 400 where the template refuses it."""
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
    """Whether the folder's own template ends each prompt in an open `<think>`.

    The models that always think share a type with those that may, and differ from them in this.
    """
    settings = _read_json(folder / "tokenizer_config.json")
    return _OPENS_REASONING.search(_find_source(folder, settings)) is not None


def template_digest(folder: Path) -> str:
    """Of the folder's own template, so that another one is told from it."""
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
    # Templates are written for the standard library's spacing.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise ValueError(message)
