"""Short processes that each run one part of a trainer and print one line of JSON.

    python -m benchmarks.lib.trainer_cases save|journal|resume FOLDER MEGABYTES

A peak is the kernel's own (VmHWM of proc(5)), reset when the case has prepared its inputs.
"""

import gc
import json
import sys
from pathlib import Path

import numpy as np

from rollmesh.core.config import JournalConfig
from rollmesh.core.ids import GroupId
from rollmesh.core.types import GroupRecord, Task
from rollmesh.serve.client.client import RolloutClient
from rollmesh.serve.client.journal import open_journal
from rollmesh.serve.client.journal_entries import RunBegan
from rollmesh.wire.frames import Packet, encode_record
from rollmesh.wire.messages import GroupFinished

MB = 10**6
RESULT_MB = 1
PATIENCE_S = 1.0
WIDTH = 1024


def memory_mb(line: str) -> float:
    """Read VmRSS or VmHWM."""
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(each for each in status if each.startswith(line)).split()[1]) * 1024 / MB


def reset_peak() -> None:
    """Set the peak to the current resident memory."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")


def save(folder: Path, size_mb: int) -> dict[str, float]:
    """Write a model of `size_mb` twice, as a checkpoint and its successor."""
    # Imported here, since torch would be nine tenths of the memory of the other cases.
    from rollmesh.trainer.models.folders import save_model  # noqa: PLC0415 - see above
    from rollmesh.trainer.models.tiny import TinyShape, write_tiny_model  # noqa: PLC0415 - see above

    num_layers = max(1, round(size_mb * MB / (4 * (4 * WIDTH**2 + 3 * WIDTH * 4 * WIDTH))))
    shape = TinyShape(
        width=WIDTH,
        num_layers=num_layers,
        num_heads=16,
        num_kv_heads=16,
        head_dim=WIDTH // 16,
        mlp_width=4 * WIDTH,
    )
    model = write_tiny_model(folder / "source", ("few words",), shape, seed=0)
    model_mb = sum(each.numel() * each.element_size() for each in model.parameters()) / MB
    reset_peak()
    before_mb = memory_mb("VmRSS")
    for _ in range(2):
        save_model(model, folder / "source", folder / "checkpoint")
    peak_mb = memory_mb("VmHWM")
    return {
        "model_mb": model_mb,
        "before_mb": before_mb,
        "peak_mb": peak_mb,
        "after_mb": memory_mb("VmRSS"),
        "copies_of_the_model": (peak_mb - before_mb) / model_mb,
    }


def journal(folder: Path, size_mb: int) -> dict[str, float]:
    """Fill a client's journal with `size_mb` that no step has taken."""
    book = open_journal(folder, JournalConfig())
    book.begin(RunBegan("r1"), saved=None)
    body = encode_record(GroupRecord(task=Task(id="t")))
    token_ids = np.random.default_rng(0).bytes(RESULT_MB * MB)
    for seq in range(size_mb // RESULT_MB):
        message = GroupFinished(GroupId("r1", seq), 1, "w1", complete=True)
        book.keep(message, Packet(message, "", body, (token_ids, b"")))
    book.close()
    return {"size_mb": book.size_bytes / MB}


def resume(folder: Path, size_mb: int) -> dict[str, float]:
    """Resume from it and take all groups, a few at a time."""
    reset_peak()
    idle_mb = memory_mb("VmRSS")
    client = RolloutClient("tcp://127.0.0.1:1", JournalConfig(), folder)
    client.start()
    num_left = size_mb // RESULT_MB
    while num_left:
        num_left -= len(client.take(PATIENCE_S))
    client.close()
    return {
        "journal_mb": float(size_mb),
        "idle_mb": idle_mb,
        "peak_over_idle_mb": memory_mb("VmHWM") - idle_mb,
    }


def main() -> None:
    """Run one case."""
    case = {"save": save, "journal": journal, "resume": resume}[sys.argv[1]]
    print(json.dumps(case(Path(sys.argv[2]), int(sys.argv[3]))))


if __name__ == "__main__":
    main()
