"""A real SGLang in bfloat16 accepts every publication, however little a step moves the weights."""

from pathlib import Path

import pytest

from tests.contract.conftest import LIMITS, NOT_INSTALLED
from tests.contract.processes import SGLANG_INSTALLED, sglang_engine
from tests.publications import publications

NUM = 50


@pytest.mark.sglang
@pytest.mark.timeout(600)
@pytest.mark.parametrize("learning_rate", [0.0, 1e-9], ids=["default", "1e-9"])
def test_exact_bfloat16_sglang_accepts_every_publication(
    learning_rate: float, model_folder: Path, tmp_path: Path
) -> None:
    if not SGLANG_INSTALLED.exists():
        pytest.skip(NOT_INSTALLED)
    options = (*LIMITS, "--dtype", "bfloat16")
    with (
        sglang_engine(model_folder, *options) as engine,
        publications(model_folder, [engine.address], tmp_path, learning_rate) as run,
    ):
        for _ in range(NUM):
            assert run.publish().updated == (engine.address,)
            run.train()
        assert run.doubted() == []
