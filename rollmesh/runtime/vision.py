"""Chats that show images, as token ids with one placeholder for each image.

Owns the rendering of image parts. Invariant: a prompt has as many placeholders as its chat shows
images, in the same order, whoever wrote them, and no image is opened or copied here. SGLang takes
such ids as they are and puts as many image tokens in each placeholder's stead as the model's own
processor says. Seen on 0.5.21 with a tiny Qwen3-VL: the ids it returns are ours but for that,
sampled ones included, over several turns; ids that are expanded already it refuses, as it does a
wrong number of images (500). A trainer expands the recorded ids by the same processor. Driven by
prompts.py.
"""

from collections.abc import Sequence
from typing import Any

from rollmesh.core.errors import SessionError
from rollmesh.runtime.chat import ROLES, ChatMessage, Part


class PlaceholderRenderer:
    """A multimodal renderer of the library, as families.Renderer; its image processor stays out."""

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
        """As the library's."""
        return self._renderer.bridge_to_next_turn(
            previous_prompt_ids,
            previous_completion_ids,
            new_messages,
            tools=tools,
            process_multimodal=False,
        )


def with_images(message: ChatMessage) -> dict[str, Any]:
    """A message as multimodal renderers take it."""
    if not message.images():
        return message.for_template()
    assert isinstance(message.content, list)
    plain = ChatMessage(message.role, "", tool_call_id=message.tool_call_id)
    return {**plain.for_template(), "content": [_part(part) for part in message.content]}


def check_placeholders(
    token_ids: Sequence[int], messages: Sequence[ChatMessage], image_id: int
) -> None:
    """SessionError 400 unless each image has its placeholder and each placeholder its image."""
    num_images = sum([len(message.images()) for message in messages])
    num_places = token_ids.count(image_id)
    if num_places != num_images:
        roles = {ROLES[message.role] for message in messages if message.images()}
        where = f" (messages with images: {', '.join(sorted(roles))})" if roles else ""
        raise SessionError(
            400,
            "unsupported_content",
            f"{num_images} images are shown{where}, but this model's chat format has a place for "
            f"{num_places}: users and tools can show images, and their marks cannot be written",
        )


def check_sampled(sampled_ids: Sequence[int], image_id: int) -> None:
    """SessionError 400 where a turn to go on from holds a placeholder that shows no image.

    A model may sample the mark like any token. It trains as one; but in a prompt neither an engine
    nor a trainer's processor could tell it from the place of an image.
    """
    if image_id in sampled_ids:
        raise SessionError(
            400,
            "unsupported_content",
            "the model itself wrote the mark of an image in an earlier turn, and no engine could "
            "tell it from the place of one: go on without that turn",
        )


def _part(part: Part | str) -> dict[str, Any]:
    if isinstance(part, Part) and part.image is not None:
        return {"type": "image"}
    return {"type": "text", "text": part if isinstance(part, str) else part.said() or ""}
