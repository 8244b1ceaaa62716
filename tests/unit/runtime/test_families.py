"""Choice of the renderer of a model folder, and what its import does not load."""

import subprocess
import sys
from pathlib import Path

import pytest
import renderers
from renderers.kimi_k25 import KimiK25Renderer

from rollmesh.core.errors import ConfigError, ModelError
from rollmesh.runtime.families import chats_of, choose_family, refuse_processors
from rollmesh.runtime.tokenizer import Tokenizer, load_tokenizer
from rollmesh.runtime.tool_calls import CallStyle
from rollmesh.testing.model_folder import write_model_folder

OWN_TEMPLATE = "{{ 'own template: ' }}{{ messages[0].content }}"
OWN_PROMPT = "own template: hello"
QWEN_PROMPT = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def prompt_of(folder: Path, name: str = "auto") -> str:
    """The text of a short chat in the format that is chosen for a folder."""
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


def test_a_family_never_loads_a_processor_that_runs_code_of_the_folder() -> None:
    renderer = KimiK25Renderer.__new__(KimiK25Renderer)
    refuse_processors(renderer)
    with pytest.raises(ModelError, match="would run code"):
        renderer._get_processor()  # noqa: SLF001 - where the library loads it


def test_an_unknown_family_is_refused_by_name(model_folder: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"model\.renderer: no family 'gwen'"):
        choose_family(model_folder, "gwen", tokenizer)


@pytest.mark.parametrize("fault", [AssertionError, RuntimeError, OSError])
def test_a_family_that_cannot_be_made_is_told_in_one_line(
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


def test_a_folder_without_a_config_is_no_model_folder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    with pytest.raises(ModelError, match=r"no readable config\.json"):
        choose_family(tmp_path, "auto", tokenizer)


def test_the_library_is_loaded_without_the_openai_sdk(model_folder: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from rollmesh.runtime.families import choose_family;"
        "from rollmesh.runtime.tokenizer import load_tokenizer;"
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


def test_a_template_that_shows_calls_as_xml_is_read_so(tmp_path: Path) -> None:
    source = "{{ '<function=f>' }}{{ messages[0].content }}"
    folder = write_model_folder(tmp_path, model_type="unheard", chat_template=source)
    assert choose_family(folder, "auto", load_tokenizer(folder)).style is CallStyle.XML


def test_what_makes_chats_is_told_by_its_family_or_by_the_template_itself(
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
