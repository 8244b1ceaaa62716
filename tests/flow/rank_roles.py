"""Roles for tests of the train controller; made in rank processes."""

import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rollmesh.trainer.controller.rendezvous import RankContext


class Arithmetic:
    """Small sums, and common faults."""

    def __init__(self, context: RankContext, **settings: Any) -> None:
        self._place = context
        self._settings = settings
        self._kept: list[Any] = []

    def double(self, rows: Sequence[dict[str, Tensor]], row_weights: Sequence[float] = ()) -> Any:
        """Double each row's numbers; return them and their sum on this rank, without padding."""
        weights = list(row_weights) or [1.0] * len(rows)
        total = sum(float(row["x"].sum()) * w for row, w in zip(rows, weights, strict=True))
        return {"twice": [row["x"] * 2 for row in rows], "total": total, "num_rows": sum(weights)}

    def echo(self, rows: Sequence[Any], row_weights: Sequence[float] = ()) -> Any:
        """Return each argument, and a new tensor."""
        return [{"same": row, "new": row + 0} for row in rows]

    def all_of(self, value: float) -> dict[str, float]:
        """Run a collective of all ranks."""
        total = torch.tensor([value + self._place.rank])
        dist.all_reduce(total)
        return {"total": float(total)}

    def digest(self, rows: Sequence[Tensor], scale: float) -> tuple[float, ...]:
        """Return the sums of all ranks of this head's group, the same at every head."""
        mine = torch.tensor([float(sum(float(row.double().sum()) for row in rows)) * scale])
        width = self._place.mesh.size(1)
        gathered = [torch.zeros_like(mine) for _ in range(width)]
        dist.all_gather(gathered, mine, group=self._place.mesh.get_group("tensor"))
        return tuple(float(each) for each in gathered)

    def fail_at(self, rank: int) -> None:
        """Raise at one rank; no other rank waits for it."""
        if self._place.rank == rank:
            raise ValueError(f"rank {rank} was to fail\nand said more")

    def leave_alone(self, absent: int, flag: str) -> None:
        """Keep `absent` out of a collective that the other ranks have entered, until it is
        killed.
        """
        if self._place.rank == absent:
            Path(flag).write_bytes(b"here")
            threading.Event().wait()
        dist.all_reduce(torch.zeros(1))

    def fail_and_leave_alone(self, absent: int) -> None:
        """Raise at `absent`, while the other ranks are in a collective."""
        if self._place.rank == absent:
            raise ValueError("it did not come to the collective")
        dist.all_reduce(torch.zeros(1))

    def keep(self, rows: Sequence[Tensor]) -> None:
        """Keep a reference to rows after the call: a leak."""
        self._kept.append(rows)

    def forget(self) -> None:
        """Drop the references."""
        self._kept.clear()

    def keep_briefly(self, rows: Sequence[Tensor]) -> None:
        """Hold rows for 50 ms after the call, as gloo may after a collective."""
        threading.Timer(0.05, lambda _: None, args=(rows,)).start()

    def fail_on(self, rows: Sequence[Tensor]) -> None:
        """Raise at each rank that has rows, while it looks at them."""
        raise ValueError(f"rank {self._place.rank} has {len([row[:1] for row in rows])} rows")

    def log(self, line: str) -> None:
        """Print a line, as a role does while it is debugged."""
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def wait_for(self, rank: int, flag: str, gate: str) -> None:
        """Signal at one rank by the pipe `flag` that the call has begun, and wait until `gate` is
        opened for writing."""
        if self._place.rank == rank:
            Path(flag).write_bytes(b"here")
            Path(gate).read_bytes()

    def setting(self, name: str) -> Any:
        """Return a setting of this role."""
        return self._settings[name]

    def _private(self) -> None:
        """Not callable."""


class Broken:
    """A role whose construction fails."""

    def __init__(self, context: RankContext) -> None:
        raise RuntimeError(f"rank {context.rank} has no such model")
