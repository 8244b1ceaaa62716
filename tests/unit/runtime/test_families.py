"""Which renderer a folder gets, and what its import does not load."""

import subprocess
import sys
from pathlib import Path

import pytest
import renderers
from renderers.kimi_k25 import KimiK25Renderer

from rollmesh.core.errors import ConfigError, ModelError
from rollmesh.runtime.families import TemplateRenderer, chats_of, choose_family, refuse_processors
from rollmesh.runtime.tokenizer import Tokenizer, load_tokenizer
from rollmesh.runtime.tool_calls import CallStyle
from rollmesh.testing.model_folder import write_model_folder


def test_a_known_model_type_gets_its_family(model_folder: Path, tokenizer: Tokenizer) -> None:
    family = choose_family(model_folder, "auto", tokenizer)
    assert type(family.renderer).__name__ == "Qwen3Renderer"
    assert family.style is CallStyle.JSON


def test_an_unknown_model_type_gets_the_folders_own_template(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path, model_type="never_heard_of")
    family = choose_family(folder, "auto", load_tokenizer(folder))
    assert isinstance(family.renderer, TemplateRenderer)


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


@pytest.mark.parametrize(("template", "is_family"), [(THINKS, False), (MAY_THINK, True)])
def test_a_model_that_always_thinks_gets_its_own_template(
    tmp_path: Path, template: str, is_family: bool
) -> None:
    folder = write_model_folder(tmp_path, model_type="qwen3", chat_template=template)
    family = choose_family(folder, "auto", load_tokenizer(folder))
    assert isinstance(family.renderer, TemplateRenderer) is not is_family


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
