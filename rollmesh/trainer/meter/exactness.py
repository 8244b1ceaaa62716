"""The exactness meter: how far engines' log-probs lie from those recomputed here, and whose it is.

    gap       |recorded - recomputed| of a token, by the weights held as the step begins
    exact     gaps of tokens that are said to be of those very weights: noise, or a fault
    drift     gaps of tokens of older ones: how far the policy has moved since, no fault
    masked    a sample whose exact gaps are past the bound, on average or one of them SPIKE times:
              what it names did not make it, it trains nothing

Owns the books by origin (engine, version, dialect, fork cause). Invariants: exact and drift are
never added up; a gap that is no number is past every bound, whoever sampled the token. What they
say of an engine is judged in suspicion.py. Pure; driven by the train loop, fed by the policy. N
trained tokens.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rollmesh.core.types import Json
from rollmesh.serve.client.runs import SampledRun
from rollmesh.serve.client.samples import Sample

ALL_VERSIONS = -1
MAX_ORIGINS = 1024
"""That a run's books tell apart."""
DIGITS = 6
SPIKE = 20.0
"""One token may be off by so many times what a sample may be on average: where a kernel rounds,
gaps have a long tail, and of a thousand tokens of a sound bfloat16 engine some are far off."""


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
    runs = [_runs(each) for each in samples]
    lengths = [run.num_tokens for each in runs for run in each]
    assert sum(lengths) == len(gaps_N), "each token is in one run"
    starts = np.cumsum([0, *lengths])[:-1]
    totals = np.add.reduceat(gaps_N, starts, dtype=np.float64) if lengths else gaps_N
    largest = np.maximum.reduceat(gaps_N, starts) if lengths else gaps_N
    rows = map(RunGap, lengths, totals.tolist(), largest.tolist())
    return [list(itertools.islice(rows, len(each))) for each in runs]


def exact_gap(sample: Sample, gaps: Gaps, held: int | None) -> Cell:
    """Of those of its tokens that the version `held` sampled, if any."""
    own = Cell()
    for run, gap in zip(_runs(sample), gaps, strict=True):
        if run.policy_version == held:
            own.add(gap)
    return own


def is_masked(sample: Sample, gaps: Gaps, held: int | None, max_gap: float) -> bool:
    """Whether it is not what its recording says it is, by the weights that the step began with."""
    has_numbers = all(math.isfinite(gap.largest) for gap in gaps)
    return not has_numbers or _is_past(exact_gap(sample, gaps, held), max_gap)


def find(
    samples: Sequence[Sample], gaps: Sequence[Gaps], held: int | None, max_gap: float
) -> Findings:
    """Book a step's gaps; `held` is the version of the weights that it began with, if any.

    A sample without gaps was not looked at before the weights moved, and says nothing.
    """
    exact: dict[Origin, Cell] = {}
    drift: dict[Origin, Cell] = {}
    masked: list[int] = []
    for at, (sample, each) in enumerate(zip(samples, gaps, strict=True)):
        is_strange = bool(each) and is_masked(sample, each, held, max_gap)
        masked += [at] if is_strange else []
        for origin, cell in _cells(sample, each).items():
            is_exact = origin.policy_version == held
            is_off = _is_past(cell, max_gap) if is_exact else not math.isfinite(cell.largest)
            cell.num_masked = int(is_strange and is_off)
            (exact if is_exact else drift).setdefault(origin, Cell()).add(cell)
    return Findings(exact, drift, masked, _only(exact))


def _is_past(cell: Cell, max_gap: float) -> bool:
    """Whether tokens are off by more than the bound on average, or one of them by SPIKE times that;
    one that is no number is. Of no tokens none is."""
    is_within = cell.total <= max_gap * cell.num_tokens and cell.largest <= SPIKE * max_gap
    return cell.num_tokens > 0 and not is_within


def _runs(sample: Sample) -> Sequence[SampledRun]:
    return sample.runs or (SampledRun(int(sample.loss_mask.sum()), 0),)


def _cells(sample: Sample, gaps: Gaps) -> dict[Origin, Cell]:
    """One sample's."""
    cells: dict[Origin, Cell] = {}
    for run, gap in zip(_runs(sample) if gaps else (), gaps, strict=True):
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

    def state(self) -> list[dict[str, Json]]:
        """All of it, for a savepoint; gaps as text, since JSON has no word for one that is none."""
        return [
            {
                "origin": list(origin),
                "counts": [cell.num_tokens, cell.num_samples, cell.num_masked],
                "gaps": [repr(cell.total), repr(cell.largest)],
            }
            for origin, cell in self._cells.items()
        ]

    def restore(self, state: Json) -> None:
        """Book on from there."""
        for row in msgspec.convert(state, list[_SavedCell]):
            num_tokens, num_samples, num_masked = row.counts
            total, largest = map(float, row.gaps)
            cell = Cell(num_tokens, total, largest, num_samples, num_masked)
            self._cells[Origin(*row.origin)] = cell


class _SavedCell(msgspec.Struct, frozen=True):
    origin: tuple[int, str, str, str]
    counts: tuple[int, int, int]
    gaps: tuple[str, str]
