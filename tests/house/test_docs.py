"""What docs/explanation/faults.md names as proof is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`((?:tests/[a-z_/]+/)?test_[a-z_]+)(?:::(test_[a-z_]+?)(\.\.\.)?)?`")
PROOFS = NAMED.findall((ROOT / "docs/explanation/faults.md").read_text())


@pytest.mark.parametrize(("file", "test", "is_cut"), PROOFS)
def test_proof_of_a_fault_is_there(file: str, test: str, is_cut: str) -> None:
    path = ROOT / (f"{file}.py" if "/" in file else f"tests/flow/{file}.py")
    name = (test or "test_") + (r"\w*" if is_cut or not test else "")
    assert re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE)


def test_proofs_are_named() -> None:
    assert len(PROOFS) > 30
