"""The exactness meter: how far engines' log-probs lie from those recomputed here, and whose it is.

    gap       |recorded - recomputed| of a token, by the weights held as the step begins
    exact     gaps of tokens that are said to be of those very weights: noise, or a fault
    drift     gaps of tokens of older ones: how far the policy has moved since, no fault
    masked    a sample with an exact gap past the bound: what it names did not make it, it trains
              nothing

Owns the books by origin (engine, version, dialect, fork cause). Invariants: exact and drift are
never added up; a gap that is no number is past every bound. What they say of an engine is judged in
suspicion.py. Pure; driven by the train loop, fed by the policy. N trained tokens.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rollmesh.serve.client.runs import SampledRun
from rollmesh.serve.client.samples import Sample

ALL_VERSIONS = -1
MAX_ORIGINS = 1024
"""That a run's books tell apart."""
DIGITS = 6


class RunGap(msgspec.Struct, frozen=True, array_like=True):
    """Of the tokens of one SampledRun."""

    num_tokens: int
    total: float
    largest: float


Gaps = list[RunGap]
"""Of a sample, run by run."""


class Origin(NamedTuple):
    """What tokens have in common."""

    policy_version: int
    engine: str
    dialect: str
    cause: str


class Cell(msgspec.Struct):
    """What is known of one origin's tokens."""

    num_tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    num_samples: int = 0
    """That have tokens of it."""
    num_masked: int = 0
    """Of those, because of such tokens."""

    def add(self, other: "Cell | RunGap") -> None:
        """Tokens of the same origin."""
        self.num_tokens += other.num_tokens
        self.total += other.total
        # One that is no number is the largest of all.
        self.largest = max(self.largest, other.largest, key=lambda gap: (math.isnan(gap), gap))
        if isinstance(other, Cell):
            self.num_samples += other.num_samples
            self.num_masked += other.num_masked

    def row(self) -> dict[str, Any]:
        """For records."""
        return {
            "num_tokens": self.num_tokens,
            "mean_gap": round(self.total / max(1, self.num_tokens), DIGITS),
            "max_gap": round(self.largest, DIGITS),
            "num_samples": self.num_samples,
            "num_masked": self.num_masked,
        }


Cells = Mapping[Origin, Cell]


class Findings(msgspec.Struct, frozen=True):
    """What one step's gaps say."""

    exact: dict[Origin, Cell]
    drift: dict[Origin, Cell]
    masked: list[int]
    """Which samples."""
    only: dict[str, str]
    """What all masked ones have in common and not all others: of engine, dialect, fork_cause."""

    @property
    def max_gap(self) -> float:
        """Of all exact ones."""
        total = Cell()
        for cell in self.exact.values():
            total.add(cell)
        return round(total.largest, DIGITS)

    def rows(self) -> list[dict[str, Any]]:
        """For metrics.jsonl."""
        parts = (("exact", self.exact), ("drift", self.drift))
        return [
            {"kind": kind, **_named(origin), "policy_version": origin.policy_version, **cell.row()}
            for kind, cells in parts
            for origin, cell in sorted(cells.items())
        ]


def measure(gaps_N: npt.NDArray[np.float32], samples: Sequence[Sample]) -> list[Gaps]:
    """Per sample its gaps run by run, all in one where it has no runs.

    `gaps_N` are those of the samples' trained tokens, one by one.
    """
    runs = [each.runs or (SampledRun(int(each.loss_mask.sum()), 0),) for each in samples]
    lengths = [run.num_tokens for each in runs for run in each]
    assert sum(lengths) == len(gaps_N), "each token is in one run"
    starts = np.cumsum([0, *lengths])[:-1]
    totals = np.add.reduceat(gaps_N, starts, dtype=np.float64) if lengths else gaps_N
    largest = np.maximum.reduceat(gaps_N, starts) if lengths else gaps_N
    rows = map(RunGap, lengths, totals.tolist(), largest.tolist())
    return [list(itertools.islice(rows, len(each))) for each in runs]


def is_past(gap: float, max_gap: float) -> bool:
    """Whether a gap is past the bound; one that is no number is."""
    return not gap <= max_gap


def find(
    samples: Sequence[Sample], gaps: Sequence[Gaps], held: int | None, max_gap: float
) -> Findings:
    """Book a step's gaps; `held` is the version of the weights that it began with, if any."""
    exact: dict[Origin, Cell] = {}
    drift: dict[Origin, Cell] = {}
    masked: list[int] = []
    for at, (sample, each) in enumerate(zip(samples, gaps, strict=True)):
        for origin, cell in _cells(sample.runs, each).items():
            is_exact = origin.policy_version == held
            cell.num_masked = int(is_exact and is_past(cell.largest, max_gap))
            (exact if is_exact else drift).setdefault(origin, Cell()).add(cell)
            if cell.num_masked and masked[-1:] != [at]:
                masked.append(at)
    return Findings(exact, drift, masked, _only(exact))


def _cells(runs: Sequence[SampledRun], gaps: Gaps) -> dict[Origin, Cell]:
    """One sample's."""
    cells: dict[Origin, Cell] = {}
    for run, gap in zip(runs, gaps, strict=True):
        cells.setdefault(Origin(*run.origin), Cell(num_samples=1)).add(gap)
    return cells


def _named(origin: Origin) -> dict[str, str]:
    return {"engine": origin.engine, "dialect": origin.dialect, "fork_cause": origin.cause}


def _only(exact: Cells) -> dict[str, str]:
    strange = [_named(origin) for origin, cell in exact.items() if cell.num_masked]
    only = {}
    for name in strange[0] if strange else ():
        values = {each[name] for each in strange}
        if len(values) == 1 and values < {_named(origin)[name] for origin in exact}:
            only[name] = values.pop()
    return only


class ExactnessBook:
    """A run's exact gaps by engine, dialect and fork cause; versions are too many to keep."""

    def __init__(self) -> None:
        self._cells: dict[Origin, Cell] = {}

    def add(self, findings: Findings) -> None:
        """One step's."""
        for origin, cell in findings.exact.items():
            known = origin._replace(policy_version=ALL_VERSIONS)
            if known not in self._cells and len(self._cells) >= MAX_ORIGINS:
                known = Origin(ALL_VERSIONS, "others", "", "")
            self._cells.setdefault(known, Cell()).add(cell)

    def rows(self) -> list[dict[str, Any]]:
        """For summary.json."""
        return [_named(origin) | cell.row() for origin, cell in sorted(self._cells.items())]
