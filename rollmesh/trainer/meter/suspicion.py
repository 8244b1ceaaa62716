"""Which engine samples what its weights do not, by what the exactness meter found in recent steps.

    an engine is at fault that was masked in this step, has MIN_SAMPLES samples or more and at least
    FAULTY_SHARE of them masked, beside a witness: another engine with as many of the same dialects
    and fork causes, and none masked

Without a witness no engine is blamed: where all disagree alike, the fault is the trainer's or the
dialect's. Where rollouts are of older weights mostly, a step has few exact tokens, so what is known
of an origin adds up: from step to step as long as it stays as it is, masked or not, and for
MEMORY_STEPS after it was last seen. Invariant: an engine that was blamed begins anew, since it is
to be updated. Pure; driven by the train loop.
"""

from collections.abc import Iterable

import msgspec

from rollmesh.trainer.meter.exactness import Cell, Findings, Origin

MIN_SAMPLES = 4
FAULTY_SHARE = 0.5
MEMORY_STEPS = 16

Kind = tuple[str, str]
"""(dialect, fork cause)"""


class Fault(msgspec.Struct, frozen=True):
    """An engine samples what its weights do not."""

    engine: str
    policy_version: int
    """The last under which it did."""
    why: str


class _Standing(msgspec.Struct):
    cell: Cell
    seen: int
    """In which step."""


class Suspicion:
    """See the module; engines that nobody wrote down are not judged."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._engines: dict[str, dict[Kind, _Standing]] = {}

    def judge(self, findings: Findings) -> list[Fault]:
        """Take what one step found; the engines that are at fault."""
        self._num_steps += 1
        masked: dict[str, int] = {}
        for origin, cell in findings.exact.items():
            if origin.engine:
                self._note(origin, cell)
                masked |= {origin.engine: origin.policy_version} if cell.num_masked else {}
        self._forget()
        faults = []
        for engine, policy_version in sorted(masked.items()):
            if why := self._why(engine):
                faults.append(Fault(engine, policy_version, why))
        for fault in faults:
            del self._engines[fault.engine]
        return faults

    def _note(self, origin: Origin, cell: Cell) -> None:
        kinds, kind = self._engines.setdefault(origin.engine, {}), (origin.dialect, origin.cause)
        known, total = kinds.get(kind), Cell()
        if known and bool(known.cell.num_masked) == bool(cell.num_masked):
            total.add(known.cell)
        total.add(cell)
        kinds[kind] = _Standing(total, self._num_steps)

    def _forget(self) -> None:
        oldest = self._num_steps - MEMORY_STEPS
        for engine, kinds in list(self._engines.items()):
            for kind in [each for each, known in kinds.items() if known.seen < oldest]:
                del kinds[kind]
            if not kinds:
                del self._engines[engine]

    def _why(self, engine: str) -> str:
        """Why it is at fault; '' where it is not, or nobody can tell."""
        kinds = self._engines[engine]
        own = _sum(known.cell for known in kinds.values())
        if own.num_samples < MIN_SAMPLES or own.num_masked < FAULTY_SHARE * own.num_samples:
            return ""
        alike = [kind for kind, known in kinds.items() if known.cell.num_masked]
        for witness in sorted(self._engines.keys() - {engine}):
            others = self._engines[witness]
            told = _sum(others[kind].cell for kind in alike if kind in others)
            if told.num_samples >= MIN_SAMPLES and not told.num_masked:
                return (
                    f"{own.num_masked} of its {own.num_samples} samples have log-probs that are "
                    f"off by up to {own.largest:.3g}, and none of {told.num_samples} alike of "
                    f"{witness}"
                )
        return ""


def _sum(cells: Iterable[Cell]) -> Cell:
    total = Cell()
    for cell in cells:
        total.add(cell)
    return total
