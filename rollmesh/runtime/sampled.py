"""What one turn has sampled so far: ids, log-probs, and the versions and engines they came from.

Invariants: there are as many log-probs as ids, and the version runs add up to as many; neighbouring
runs have another version or another engine; likeliest tokens are kept for each id or for none.
Driven by generation.py.
"""

from array import array
from collections.abc import Sequence

from rollmesh.core.types import VersionRun
from rollmesh.engine.answers import UNVERSIONED, TopLogprobs


class SampledTokens:
    """Grows at its end; `truncate` takes back what lies behind a stop.

    Its arrays and lists stay the same objects: readers hold them.
    """

    def __init__(self) -> None:
        self.token_ids = array("i")
        self.logprobs = array("f")
        self.policy_versions: list[VersionRun] = []
        """Whose engines are places in `engines`."""
        self.engines: list[str] = []
        """That a leg ran at, in order."""
        self.top_logprobs: list[TopLogprobs] = []
        self._engine = -1
        """Of the leg that runs."""

    def __len__(self) -> int:
        return len(self.token_ids)

    def begin_leg(self, engine: str) -> None:
        """What comes from now on is sampled there."""
        if engine not in self.engines:
            self.engines.append(engine)
        self._engine = self.engines.index(engine)

    def append(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        policy_version: int,
        top_logprobs: Sequence[TopLogprobs] = (),
    ) -> None:
        """Add tokens of one version; the sequences are of one length, the last may be empty."""
        if token_ids:
            # Made of a list at once and then joined, which is twice as fast as item by item.
            self.token_ids += array("i", token_ids)
            self.logprobs += array("f", logprobs)
            if top_logprobs:
                self.top_logprobs.extend(top_logprobs)
            self._add_run(VersionRun(policy_version, len(token_ids), self._engine))

    def restate(self, offset: int, runs: Sequence[VersionRun]) -> None:
        """Replace the versions of this leg's tokens, which are those from `offset` on.

        Only if `runs` add up to so many.
        """
        said = [VersionRun(run.policy_version, run.num_tokens, self._engine) for run in runs]
        if not offset and self.policy_versions == said:
            return
        if sum(run.num_tokens for run in runs) == len(self) - offset:
            self._truncate_runs(offset)
            for run in said:
                self._add_run(run)

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens`."""
        del self.token_ids[num_tokens:]
        del self.logprobs[num_tokens:]
        del self.top_logprobs[num_tokens:]
        self._truncate_runs(num_tokens)

    def _add_run(self, run: VersionRun) -> None:
        runs = self.policy_versions
        if runs and _is_like(runs[-1], run):
            runs[-1] = _of(runs[-1], runs[-1].num_tokens + run.num_tokens)
        else:
            runs.append(run)

    def _truncate_runs(self, num_tokens: int) -> None:
        total = sum(run.num_tokens for run in self.policy_versions)
        while total > num_tokens:
            last = self.policy_versions.pop()
            total -= last.num_tokens
            if total < num_tokens:
                self.policy_versions.append(_of(last, num_tokens - total))
                total = num_tokens


def fall_back(runs: Sequence[VersionRun], seen: int) -> tuple[int, int]:
    """(version that a session wants next, number of moves to older weights), of a turn that began
    when the session had `seen` this version; unnumbered runs are not compared."""
    num_falls = 0
    for run in runs:
        if run.policy_version != UNVERSIONED:
            num_falls += run.policy_version < seen
            seen = run.policy_version
    return seen, num_falls


def _is_like(run: VersionRun, other: VersionRun) -> bool:
    return run.policy_version == other.policy_version and run.engine == other.engine


def _of(run: VersionRun, num_tokens: int) -> VersionRun:
    return VersionRun(run.policy_version, num_tokens, run.engine)
