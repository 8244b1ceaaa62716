"""How far engines' log-probs are from those recomputed here, and which engines are faulty. Pure.

    gap       |recorded - recomputed| of a token, under the weights held as the step begins
    exact     gaps of tokens that those very weights sampled: noise, or a fault
    drift     gaps of tokens of older weights: how far the policy has moved since, no fault

- A token does not train if its exact gap is above the token bound, or if its record is not finite.
- A sample does not train if the mean of its exact gaps is above the sample bound. In that mean a
  token counts as the token bound at most, so one token among thousands masks no sample.
- Exact gaps and drift are never added up. Gaps are counted by engine, version, dialect, fork cause.
- The router is asked to fence a faulty engine, repeatedly until it answers; it answers repeats
  alike. Each request is reported once, after GIVE_UP_S at most.
- Shapes: N trained tokens.
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from rollmesh.core.types import Json
from rollmesh.serve.client.samples import Sample, SampledRun
from rollmesh.wire.fleet import FenceEngine, FleetAnswered
from rollmesh.wire.machine import ROUTER, Received, Send, Ticked

ALL_VERSIONS = -1
MAX_ORIGINS = 1024
"""Origins that a run tells apart."""
DIGITS = 6


class RunGap(msgspec.Struct, frozen=True, array_like=True):
    """Gaps of the tokens of one SampledRun, in nats."""

    num_tokens: int
    total: float
    largest: float
    bounded: float
    """The total with each gap limited to the token bound; a gap that is not finite counts as the
    bound."""
    num_past: int
    """Tokens past the token bound, including those that are not finite."""


Gaps = list[RunGap]
"""The gaps of a sample, one for each run."""


class Origin(NamedTuple):
    """Source of a token."""

    policy_version: int
    engine: str
    dialect: str
    cause: str


class GapStats(msgspec.Struct):
    """Gap statistics of one origin's tokens."""

    num_tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    num_samples: int = 0
    """Samples with tokens of this origin."""
    num_masked: int = 0
    """Samples among them that are masked because of these tokens."""
    bounded: float = 0.0
    num_past: int = 0
    """Tokens past the token bound; only exact ones are masked for it."""

    def add(self, other: "GapStats | RunGap") -> None:
        """Add tokens of the same origin."""
        self.num_tokens += other.num_tokens
        self.total += other.total
        self.bounded += other.bounded
        self.num_past += other.num_past
        # NaN counts as the largest.
        self.largest = max(self.largest, other.largest, key=lambda gap: (math.isnan(gap), gap))
        if isinstance(other, GapStats):
            self.num_samples += other.num_samples
            self.num_masked += other.num_masked

    def row(self) -> dict[str, Any]:
        """Return a row for records."""
        return {
            "num_tokens": self.num_tokens,
            "mean_gap": round(self.total / max(1, self.num_tokens), DIGITS),
            "max_gap": round(self.largest, DIGITS),
            "num_past": self.num_past,
            "num_samples": self.num_samples,
            "num_masked": self.num_masked,
        }


StatsByOrigin = Mapping[Origin, GapStats]


class GapFindings(msgspec.Struct, frozen=True):
    """The gaps of one step."""

    exact: dict[Origin, GapStats]
    drift: dict[Origin, GapStats]
    masked: list[int]
    """Indices of masked samples."""
    only: dict[str, str]
    """Values that all masked samples, and no others, share: engine, dialect or fork_cause."""

    @property
    def max_gap(self) -> float:
        """The largest exact gap."""
        total = GapStats()
        for cell in self.exact.values():
            total.add(cell)
        return round(total.largest, DIGITS)

    def rows(self) -> list[dict[str, Any]]:
        """Return rows for metrics.jsonl."""
        parts = (("exact", self.exact), ("drift", self.drift))
        return [
            {
                "kind": kind,
                **_origin_names(origin),
                "policy_version": origin.policy_version,
                **cell.row(),
            }
            for kind, cells in parts
            for origin, cell in sorted(cells.items())
        ]


def measure(
    gaps_N: npt.NDArray[np.float32], samples: Sequence[Sample], max_token_gap: float
) -> list[Gaps]:
    """Return each sample's gaps run by run; a sample without runs counts as one run.

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


def exact_gap(sample: Sample, gaps: Gaps, held: int | None) -> GapStats:
    """Return the statistics of the tokens that version `held` sampled."""
    own = GapStats()
    for run, gap in zip(_runs(sample), gaps, strict=True):
        if run.policy_version == held:
            own.add(gap)
    return own


def is_masked(sample: Sample, gaps: Gaps, held: int | None, max_gap: float) -> bool:
    """Return whether the recorded log-probs show that weights other than `held` made the sample."""
    return _is_past(exact_gap(sample, gaps, held), max_gap)


def find_gaps(
    samples: Sequence[Sample], gaps: Sequence[Gaps], held: int | None, max_gap: float
) -> GapFindings:
    """Collect a step's gaps by origin; `held` is the version of the weights that it began with, if
    any.

    A sample without gaps was not measured before the weights moved, and is ignored.
    """
    exact: dict[Origin, GapStats] = {}
    drift: dict[Origin, GapStats] = {}
    masked: list[int] = []
    for at, (sample, each) in enumerate(zip(samples, gaps, strict=True)):
        is_off = bool(each) and is_masked(sample, each, held, max_gap)
        masked += [at] if is_off else []
        for origin, cell in _stats_by_origin(sample, each).items():
            is_exact = origin.policy_version == held
            cell.num_masked = int(is_off and is_exact and _is_past(cell, max_gap))
            (exact if is_exact else drift).setdefault(origin, GapStats()).add(cell)
    return GapFindings(exact, drift, masked, _common_origin(exact))


def _is_past(cell: GapStats, max_gap: float) -> bool:
    """Return whether there are tokens and the mean of their bounded gaps is above the bound."""
    return cell.bounded > max_gap * cell.num_tokens


def _runs(sample: Sample) -> Sequence[SampledRun]:
    return sample.runs or (SampledRun(int(sample.loss_mask.sum()), 0),)


def _stats_by_origin(sample: Sample, gaps: Gaps) -> dict[Origin, GapStats]:
    """Return one sample's statistics by origin."""
    cells: dict[Origin, GapStats] = {}
    for run, gap in zip(_runs(sample) if gaps else (), gaps, strict=True):
        cells.setdefault(Origin(*run.origin), GapStats(num_samples=1)).add(gap)
    return cells


def _origin_names(origin: Origin) -> dict[str, str]:
    return {"engine": origin.engine, "dialect": origin.dialect, "fork_cause": origin.cause}


def _common_origin(exact: StatsByOrigin) -> dict[str, str]:
    masked = [_origin_names(origin) for origin, cell in exact.items() if cell.num_masked]
    only = {}
    for name in masked[0] if masked else ():
        values = {each[name] for each in masked}
        if len(values) == 1 and values < {_origin_names(origin)[name] for origin in exact}:
            only[name] = values.pop()
    return only


class ExactnessTotals:
    """A run's exact gaps by engine, dialect and fork cause, summed over versions."""

    def __init__(self) -> None:
        self._cells: dict[Origin, GapStats] = {}

    def add(self, findings: GapFindings) -> None:
        """Add the findings of one step."""
        for origin, cell in findings.exact.items():
            known = origin._replace(policy_version=ALL_VERSIONS)
            if known not in self._cells and len(self._cells) >= MAX_ORIGINS:
                known = Origin(ALL_VERSIONS, "others", "", "")
            self._cells.setdefault(known, GapStats()).add(cell)

    def rows(self) -> list[dict[str, Any]]:
        """Return rows for summary.json."""
        return [_origin_names(origin) | cell.row() for origin, cell in sorted(self._cells.items())]

    def state(self) -> list[dict[str, Json]]:
        """Return the state for a checkpoint; gaps are text, since JSON cannot hold NaN."""
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
        """Continue from a saved state."""
        for row in msgspec.convert(state, list[_SavedStats]):
            num_tokens, num_samples, num_masked = row.counts
            total, largest = map(float, row.gaps)
            bounded, num_past = float(row.past[0]), row.past[1]
            cell = GapStats(num_tokens, total, largest, num_samples, num_masked, bounded, num_past)
            self._cells[Origin(*row.origin)] = cell


class _SavedStats(msgspec.Struct, frozen=True):
    origin: tuple[int, str, str, str]
    counts: tuple[int, int, int]
    gaps: tuple[str, str]
    past: tuple[str, int] = ("0.0", 0)


MIN_SAMPLES = 4
FAULTY_SHARE = 0.5
MEMORY_STEPS = 16

Kind = tuple[str, str]
"""(dialect, fork cause)"""


class FaultyEngine(msgspec.Struct, frozen=True):
    """An engine that samples with other weights than it reports."""

    engine: str
    policy_version: int
    """The last version for which it did."""
    why: str


class _Evidence(msgspec.Struct):
    cell: GapStats
    seen: int
    """Step in which the origin was last seen."""


class FaultyEngineDetector:
    """Finds engines that sample with wrong weights, from the findings of recent steps.

        an engine is at fault if it had masked samples in this step, and at least MIN_SAMPLES
        samples with a share of FAULTY_SHARE masked, and a witness: another engine with as many
        samples of the same dialects and fork causes, none of them masked

    - Without a witness no engine is blamed: if all disagree, the fault is the trainer's or the
      dialect's.
    - If rollouts are mostly of older weights, a step has few exact tokens. Statistics of an origin
      therefore add up over steps while it stays masked or unmasked, for MEMORY_STEPS after it was
      last seen.
    - An engine that was blamed starts again from nothing, since it will be updated.
    - Samples without a recorded engine are ignored.
    """

    def __init__(self) -> None:
        self._num_steps = 0
        self._engines: dict[str, dict[Kind, _Evidence]] = {}

    def judge(self, findings: GapFindings) -> list[FaultyEngine]:
        """Process one step's findings; return the engines at fault."""
        self._num_steps += 1
        masked: dict[str, int] = {}
        for origin, cell in findings.exact.items():
            if origin.engine:
                self._add(origin, cell)
                masked |= {origin.engine: origin.policy_version} if cell.num_masked else {}
        self._expire()
        faults = []
        for engine, policy_version in sorted(masked.items()):
            if why := self._why(engine):
                faults.append(FaultyEngine(engine, policy_version, why))
        for fault in faults:
            del self._engines[fault.engine]
        return faults

    def _add(self, origin: Origin, cell: GapStats) -> None:
        kinds, kind = self._engines.setdefault(origin.engine, {}), (origin.dialect, origin.cause)
        known, total = kinds.get(kind), GapStats()
        if known and bool(known.cell.num_masked) == bool(cell.num_masked):
            total.add(known.cell)
        total.add(cell)
        kinds[kind] = _Evidence(total, self._num_steps)

    def _expire(self) -> None:
        oldest = self._num_steps - MEMORY_STEPS
        for engine, kinds in list(self._engines.items()):
            for kind in [each for each, known in kinds.items() if known.seen < oldest]:
                del kinds[kind]
            if not kinds:
                del self._engines[engine]

    def _why(self, engine: str) -> str:
        """Return why the engine is at fault, or '' if it is not, or if there is no witness."""
        kinds = self._engines[engine]
        own = _sum(known.cell for known in kinds.values())
        if own.num_samples < MIN_SAMPLES or own.num_masked < FAULTY_SHARE * own.num_samples:
            return ""
        shared_kinds = [kind for kind, known in kinds.items() if known.cell.num_masked]
        for witness in sorted(self._engines.keys() - {engine}):
            others = self._engines[witness]
            of_witness = _sum(others[kind].cell for kind in shared_kinds if kind in others)
            if of_witness.num_samples >= MIN_SAMPLES and not of_witness.num_masked:
                return (
                    f"{own.num_masked} of its {own.num_samples} samples have log-probs that are "
                    f"off by up to {own.largest:.3g}, but none of {of_witness.num_samples} such "
                    f"samples of {witness}"
                )
        return ""


def _sum(cells: Iterable[GapStats]) -> GapStats:
    total = GapStats()
    for cell in cells:
        total.add(cell)
    return total


REPEAT_S = 0.5
GIVE_UP_S = 10.0
"""By then the engine has other weights, or soon will have."""


class FenceRequested(msgspec.Struct, frozen=True):
    """Fence the engine at `url` until it has been updated."""

    url: str
    policy_version: int
    """The version for which it was found faulty."""
    detail: str


class FenceResult(msgspec.Struct, frozen=True):
    """The result of a request."""

    request: FenceRequested
    error: str
    """Why the engine is not fenced; '' if it is."""


class _OpenRequest(msgspec.Struct):
    request: FenceRequested
    ask: FenceEngine
    asked_s: float
    sent_s: float


class Fencing:
    """The machine of open fence requests.

    Ids count down from -1, because the publisher's count up on the same connection and each
    receives all answers.
    """

    def __init__(self) -> None:
        self._open: dict[int, _OpenRequest] = {}
        self._num_requests = 0

    def step(
        self, event: FenceRequested | Received | Ticked, now_s: float
    ) -> list[Send | FenceResult]:
        """Process one event; answers to other requests are ignored."""
        match event:
            case FenceRequested():
                self._num_requests += 1
                ask = FenceEngine(
                    -self._num_requests, event.url, event.policy_version, event.detail
                )
                self._open[ask.ask_id] = _OpenRequest(event, ask, now_s, now_s)
                return [Send(ROUTER, ask)]
            case Received(message=FleetAnswered() as answer):
                ended = self._open.pop(answer.ask_id, None)
                return [FenceResult(ended.request, answer.error)] if ended else []
        return self._tend(now_s)

    def _tend(self, now_s: float) -> list[Send | FenceResult]:
        actions: list[Send | FenceResult] = []
        for each in list(self._open.values()):
            if now_s >= each.asked_s + GIVE_UP_S:
                del self._open[each.ask.ask_id]
                actions.append(FenceResult(each.request, "the router did not answer"))
            elif now_s >= each.sent_s + REPEAT_S:
                each.sent_s = now_s
                actions.append(Send(ROUTER, each.ask))
        return actions
