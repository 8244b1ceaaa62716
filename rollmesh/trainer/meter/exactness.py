"""The exactness meter: how far engines' log-probs lie from those recomputed here, and whose it is.

    gap       |recorded - recomputed| of a token, by the weights held as the step begins
    exact     gaps of tokens that those very weights sampled: noise, or a fault
    drift     gaps of tokens of older weights: how far the policy has moved since, no fault

- A token does not train if its exact gap is past the token bound, or if what was recorded of it
  is not finite, whichever weights sampled it.
- A sample does not train if the mean of its exact gaps is past the sample bound. In that mean a
  token counts as the token bound at most, so that one token among thousands masks no sample.
- Exact gaps and drift are never added up. Gaps are booked by engine, version, dialect and fork
  cause; suspicion.py judges engines by them.

Shapes: N trained tokens.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rollmesh.core.types import Json
from rollmesh.serve.client.samples import Sample, SampledRun

ALL_VERSIONS = -1
MAX_ORIGINS = 1024
"""That a run's books tell apart."""
DIGITS = 6


class RunGap(msgspec.Struct, frozen=True, array_like=True):
    """Gaps of the tokens of one SampledRun, in nats."""

    num_tokens: int
    total: float
    largest: float
    bounded: float
    """The total where no token counts more than the token bound, nor one that is not finite."""
    num_past: int
    """Tokens past the token bound, those that are not finite among them."""


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
    """Samples that have tokens of it."""
    num_masked: int = 0
    """Samples among them that are masked because of such tokens."""
    bounded: float = 0.0
    num_past: int = 0
    """Tokens past the token bound; only exact ones are masked for it."""

    def add(self, other: "Cell | RunGap") -> None:
        """Add tokens of the same origin."""
        self.num_tokens += other.num_tokens
        self.total += other.total
        self.bounded += other.bounded
        self.num_past += other.num_past
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
            "num_past": self.num_past,
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


def measure(
    gaps_N: npt.NDArray[np.float32], samples: Sequence[Sample], max_token_gap: float
) -> list[Gaps]:
    """Return each sample's gaps run by run, all in one where it has no runs.

    `gaps_N` are the gaps of the samples' trained tokens, `max_token_gap` is the token bound.
    """
    runs = [_runs(each) for each in samples]
    lengths = [run.num_tokens for each in runs for run in each]
    assert sum(lengths) == len(gaps_N), "each token is in one run"
    starts = np.cumsum([0, *lengths])[:-1]
    totals = np.add.reduceat(gaps_N, starts, dtype=np.float64) if lengths else gaps_N
    largest = np.maximum.reduceat(gaps_N, starts) if lengths else gaps_N
    is_past_N = ~(gaps_N <= max_token_gap)
    bounded_N = np.where(is_past_N, max_token_gap, gaps_N)
    bounded = np.add.reduceat(bounded_N, starts, dtype=np.float64) if lengths else gaps_N
    num_past = np.add.reduceat(is_past_N, starts, dtype=np.int64) if lengths else gaps_N
    columns = (totals, largest, bounded, num_past)
    rows = map(RunGap, lengths, *(column.tolist() for column in columns))
    return [list(itertools.islice(rows, len(each))) for each in runs]


def exact_gap(sample: Sample, gaps: Gaps, held: int | None) -> Cell:
    """Of those of its tokens that the version `held` sampled, if any."""
    own = Cell()
    for run, gap in zip(_runs(sample), gaps, strict=True):
        if run.policy_version == held:
            own.add(gap)
    return own


def is_masked(sample: Sample, gaps: Gaps, held: int | None, max_gap: float) -> bool:
    """Whether the weights that the step began with did not make the sample, which names them."""
    return _is_past(exact_gap(sample, gaps, held), max_gap)


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
            cell.num_masked = int(is_strange and is_exact and _is_past(cell, max_gap))
            (exact if is_exact else drift).setdefault(origin, Cell()).add(cell)
    return Findings(exact, drift, masked, _only(exact))


def _is_past(cell: Cell, max_gap: float) -> bool:
    """Whether there are tokens, and the mean of their bounded gaps is past the bound."""
    return cell.bounded > max_gap * cell.num_tokens


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
        """Return the state for a checkpoint; a gap of NaN is text, which JSON can hold."""
        return [
            {
                "origin": list(origin),
                "counts": [cell.num_tokens, cell.num_samples, cell.num_masked],
                "gaps": [repr(cell.total), repr(cell.largest)],
                "past": [repr(cell.bounded), cell.num_past],
            }
            for origin, cell in self._cells.items()
        ]

    def restore(self, state: Json) -> None:
        """Book on from there."""
        for row in msgspec.convert(state, list[_SavedCell]):
            num_tokens, num_samples, num_masked = row.counts
            total, largest = map(float, row.gaps)
            bounded, num_past = float(row.past[0]), row.past[1]
            cell = Cell(num_tokens, total, largest, num_samples, num_masked, bounded, num_past)
            self._cells[Origin(*row.origin)] = cell


class _SavedCell(msgspec.Struct, frozen=True):
    origin: tuple[int, str, str, str]
    counts: tuple[int, int, int]
    gaps: tuple[str, str]
    past: tuple[str, int] = ("0.0", 0)
