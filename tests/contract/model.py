"""The model of the contract: tiny, random, and the same folder for every engine.

Its files are the same wherever they are written, and every one of its ids decodes; its context is
long enough for requests that are cut while they run. Run `python -m tests.contract.model DIR` to
write it for a manually started SGLang.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from rollmesh.testing.model_folder import write_model_folder
from tests.unit.engine.embedded.tiny_models import write_model

CONTEXT = 4096


def write_contract_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write a Qwen3 of two layers with a byte-level tokenizer and a chat template, its config
    changed by `changes`; return the folder.
    """
    write_model_folder(folder)
    settings = json.loads((folder / "tokenizer_config.json").read_bytes())
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"  # required by SGLang's transformers
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return write_model(
        folder,
        "qwen3",
        seed,
        vocab_size=tokenizer.get_vocab_size(),
        max_position_embeddings=CONTEXT,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        **changes,
    )


if __name__ == "__main__":
    write_contract_model(Path(sys.argv[1]))
