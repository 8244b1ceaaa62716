"""The backends under the contract of tensors: rollmesh's own connections, and Ray.

An owner is another process, which ends with its `with` block; tests use only the interface of a
backend.
"""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import msgspec

from rollmesh.core.ids import new_id
from rollmesh.tensors import peers
from rollmesh.tensors.fetch_buffer import TensorBackend
from rollmesh.tensors.handles import UNTAGGED, RTensor, unpack
from rollmesh.tensors.peers import Peers
from rollmesh.tensors.server import TensorServer
from rollmesh.tensors.store import OwnerStore
from tests.contract.ray_token import RAY_TOKEN
from tests.contract.tensor_owner import Ask, Count, EndStep, Free, Kind, Put

HAS_RAY = importlib.util.find_spec("ray") is not None
STORE_BYTES = 100 * 2**20
"""Size of Ray's object store, which takes no less than 75 MB."""


class OwnerProcess:
    """A process of tests/contract/tensor_owner.py."""

    def __init__(self, child: "subprocess.Popen[bytes]") -> None:
        self.child = child
        self.address: str = self._answer()

    def put(self, kinds: Sequence[Kind], seed: int = 0, step: int = UNTAGGED) -> list[RTensor]:
        return unpack(bytes.fromhex(self._ask(Put([*kinds], seed, step))))

    def clear(self, handles: Sequence[RTensor]) -> int:
        return int(self._ask(Free([each.shard_id for each in handles])))

    def end_step(self, step: int) -> int:
        return int(self._ask(EndStep(step)))

    def count(self) -> tuple[int, int]:
        """Tensors and bytes that it holds."""
        num_tensors, total_bytes, _ = self._ask(Count())
        return num_tensors, total_bytes

    def retained_bytes(self) -> int:
        """Bytes that were freed but are still in use."""
        return int(self._ask(Count())[2])

    def kill(self) -> None:
        """Kill it (-9)."""
        self.child.kill()
        self.child.wait()

    def _ask(self, ask: Ask) -> Any:
        assert self.child.stdin is not None
        self.child.stdin.write(msgspec.json.encode(ask) + b"\n")
        self.child.stdin.flush()
        return self._answer()

    def _answer(self) -> Any:
        assert self.child.stdout is not None
        return msgspec.json.decode(self.child.stdout.readline())


class Mesh:
    """A mesh of owners of one kind; this one uses rollmesh's own connections."""

    def connect(self) -> TensorBackend:
        """A consumer's backend."""
        return Peers()

    @contextmanager
    def owner(self, address: str = "tcp://127.0.0.1:0") -> Iterator[OwnerProcess]:
        """Start an owner that serves at this address."""
        argv = [sys.executable, "-m", "tests.contract.tensor_owner", address, *self._options()]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            try:
                yield OwnerProcess(child)
            finally:
                child.kill()

    @contextmanager
    def serving(self, store: OwnerStore) -> Iterator[None]:
        """Serve `store` from this process."""
        server = TensorServer(store, "tcp://127.0.0.1:0")
        server.start()
        yield
        server.stop()

    def absent(self) -> str:
        """An address without an owner."""
        return "tcp://127.0.0.1:9"

    def parts(self) -> tuple[ModuleType, str, int]:
        """Patch a constant so that one call has many parts."""
        return peers, "MAX_IDS", 2

    def is_at_rest(self) -> bool:
        """Whether nothing of what was fetched and released is left."""
        return True

    def close(self) -> None:
        """End all of its processes."""

    def _options(self) -> list[str]:
        return []


class RayMesh(Mesh):
    """A mesh in Ray, whose head is this process; a token guards Ray's ports."""

    def __init__(self) -> None:
        os.environ |= RAY_TOKEN
        import ray  # noqa: PLC0415 - is not installed everywhere

        ray.init(
            num_cpus=1,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _node_ip_address="127.0.0.1",
        )
        self._cluster = ray.get_runtime_context().gcs_address

    def connect(self) -> TensorBackend:
        from rollmesh.tensors.ray_backend import RayPeers  # noqa: PLC0415 - as above

        return RayPeers()

    @contextmanager
    def owner(self, address: str = "") -> Iterator[OwnerProcess]:
        with super().owner(address or self.absent()) as owner:
            yield owner

    @contextmanager
    def serving(self, store: OwnerStore) -> Iterator[None]:
        from rollmesh.tensors.ray_backend import RayServer  # noqa: PLC0415 - as above

        server = RayServer(store, self.absent())
        server.start()
        yield
        server.stop()

    def absent(self) -> str:
        return f"ray://{new_id('owner')}"

    def parts(self) -> tuple[ModuleType, str, int]:
        from rollmesh.tensors import ray_backend  # noqa: PLC0415 - as above

        return ray_backend, "PART_BYTES", 30

    def is_at_rest(self) -> bool:
        from ray._private.worker import global_worker  # noqa: PLC0415 - as above; it has no door

        return not global_worker.core_worker.get_all_reference_counts()

    def close(self) -> None:
        import ray  # noqa: PLC0415 - as above

        ray.shutdown()
        for name in RAY_TOKEN:
            del os.environ[name]

    def _options(self) -> list[str]:
        return ["--cluster", self._cluster]
