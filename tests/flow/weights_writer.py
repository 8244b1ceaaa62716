"""Write two versions of a policy's weights, and stop at a given stage of the second.

Arguments: the model's folder, the versions' folder and the stage. At that stage it prints the path
of the weights and waits; test_weights_killed.py kills it there.
"""

import os
import signal
import sys
import threading
from pathlib import Path

from rollmesh.core.config import TrainerConfig
from rollmesh.trainer.models.folders import partial_path
from rollmesh.trainer.policy import Policy
from rollmesh.trainer.weights.transfer import Payload, write_folder, write_shards


def main() -> None:
    """Write the first version, begin the second."""
    model, versions, stage = sys.argv[1:]
    policy = Policy(model, TrainerConfig())
    first, second = (Path(versions) / f"v{number:06d}" for number in (1, 2))
    write_folder(Payload(1, str(first), policy.export(first, 1)))
    payload = Payload(2, str(second), policy.export(second, 2))
    if stage == "written":
        write_shards(partial_path(second), payload.parts)
    else:  # a pipe without a reader: opening it for writing blocks
        os.mkfifo(partial_path(second) / "model.safetensors")
        threading.Thread(target=write_folder, args=[payload]).start()
    sys.stdout.write(f"{payload.parts[0].path}\n")
    sys.stdout.flush()
    signal.pause()


if __name__ == "__main__":
    main()
