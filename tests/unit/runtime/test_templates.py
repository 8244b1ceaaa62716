"""Chats through a folder's own template."""

from pathlib import Path
from typing import Any

import pytest

from rollmesh.core.errors import ModelError, SessionError
from rollmesh.runtime.families import TemplateRenderer
from rollmesh.runtime.tokenizer import Tokenizer, load_tokenizer
from rollmesh.testing.model_folder import write_model_folder

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


def test_what_the_template_refuses_is_a_400_with_its_words(tmp_path: Path) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    folder = write_model_folder(tmp_path, chat_template=template)
    renderer = TemplateRenderer(folder, load_tokenizer(folder))
    with pytest.raises(SessionError, match="roles must alternate") as caught:
        renderer.render_ids(CHAT)
    assert caught.value.status == 400


def test_a_folder_without_a_template_says_what_to_set(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"no chat template in it; name a family"):
        TemplateRenderer(folder, load_tokenizer(folder))
