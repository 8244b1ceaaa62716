"""The slim image without Docker: a Python that sees the base install's libraries and no others.

Only rollmesh and the direct and indirect requirements of its base install can be imported, as after
`pip install .`. Nothing is downloaded.
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
sys.path.insert(0, {root!r})
from rollmesh.cli.main import main
sys.exit(main())
"""


def make_slim(folder: Path) -> Path:
    """Make an environment in `folder`; return its bin folder, with `rollmesh` and `python`."""
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    for each in base_distributions():
        for name in top_names(each):
            link = packages / name
            if not link.exists():
                link.symlink_to(Path(str(each.locate_file(name))))
    (packages / "rollmesh").symlink_to(ROOT / "rollmesh")
    return make_script(folder / "bin", str(folder / "bin/python"), packages)


def make_full(folder: Path) -> Path:
    """Make a bin folder with `rollmesh` of the full image, which uses the tests' own Python."""
    folder.mkdir()
    return make_script(folder, sys.executable)


def make_script(folder: Path, python: str, packages: Path = ROOT) -> Path:
    """Write the script `rollmesh`, as pip does; it imports rollmesh from `packages`."""
    script = folder / "rollmesh"
    script.write_text(SCRIPT.format(python=python, root=str(packages)))
    script.chmod(0o755)
    return folder


def base_distributions() -> list[Distribution]:
    """Direct and indirect requirements of the base install."""
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
    """Packages and modules of `each`, by their names in site-packages."""
    names = {file.parts[0] for file in each.files or []}
    return {name for name in names if name not in ("..", "__pycache__") and ".pth" not in name}
