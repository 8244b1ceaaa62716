"""The slim image without Docker: a Python that sees the base install's libraries and no others.

Owns the folder. Invariant: what can be imported is rollmesh and what its base install requires,
directly or not, as `pip install .` would bring it; nothing is downloaded. Driven by test_docker.py.
"""

import sys
import venv
from collections.abc import Iterator
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.house.source import ROOT

SCRIPT = """#!{python}
import sys
from rollmesh.cli.main import main
sys.exit(main())
"""


def make_slim(folder: Path) -> Path:
    """An environment in `folder`; its bin folder, with `rollmesh` and `python`."""
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for each in base_distributions():
        for name in top_names(each):
            link = packages / name
            if not link.exists():
                link.symlink_to(Path(str(each.locate_file(name))))
    (packages / "rollmesh").symlink_to(ROOT / "rollmesh")
    return make_script(folder / "bin")


def make_full(folder: Path) -> Path:
    """A bin folder with `rollmesh` of the full image: the tests' own Python."""
    folder.mkdir()
    return make_script(folder, sys.executable)


def make_script(folder: Path, python: str = "") -> Path:
    """Put `rollmesh` into `folder`, as pip does."""
    script = folder / "rollmesh"
    script.write_text(SCRIPT.format(python=python or folder / "python"))
    script.chmod(0o755)
    return folder


def base_distributions() -> list[Distribution]:
    """What the base install requires, directly or not."""
    found: dict[str, Distribution] = {}
    waiting = list(required_by(distribution("rollmesh"), ""))
    while waiting:
        name, extra = waiting.pop()
        key = f"{canonicalize_name(name)}[{extra}]"
        if key not in found:
            found[key] = distribution(name)
            waiting += required_by(found[key], extra)
    return list(found.values())


def required_by(each: Distribution, extra: str) -> Iterator[tuple[str, str]]:
    """Names and extras that `each` requires under `extra`."""
    for text in each.requires or []:
        requirement = Requirement(text)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            for wanted in ("", *requirement.extras):
                yield requirement.name, wanted


def top_names(each: Distribution) -> set[str]:
    """The packages and modules that `each` brings, by their names in site-packages."""
    names = {file.parts[0] for file in each.files or []}
    return {name for name in names if name not in ("..", "__pycache__") and ".pth" not in name}
