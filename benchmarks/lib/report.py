"""Common parts of the benchmarks: arguments, its table, its last line of JSON and its exit code.

    --quick   shorter, with the same goals      --json    the last line is one JSON object
    --check   exit code 1 if a goal is missed   --only    some of several cases

- A goal names a figure and is missed only by that figure; goals are not lowered.
"""

import argparse
import json
import operator
import sys
from collections.abc import Collection, Sequence
from typing import NamedTuple

COMPARE = {"<=": operator.le, ">=": operator.ge}


class Goal(NamedTuple):
    """The goal that `figure` is `relation` (`<=` or `>=`) `bound`."""

    figure: str
    relation: str
    bound: float

    def is_met(self, figures: dict[str, float]) -> bool:
        """Whether the figure is within the bound."""
        return bool(COMPARE[self.relation](figures[self.figure], self.bound))


def parser(name: str, cases: Collection[str] = ()) -> argparse.ArgumentParser:
    """Return the parser of the arguments that all benchmarks take; `only` is None or a list of
    cases.
    """
    arguments = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    arguments.add_argument("--quick", action="store_true", help="shorter, with the same goals")
    arguments.add_argument("--json", action="store_true", help="the last line is one JSON object")
    arguments.add_argument("--check", action="store_true", help="exit 1 if a goal is missed")

    def known(names: str) -> list[str]:
        if unknown := set(names.split(",")) - {*cases}:
            what = f"no case {', '.join(sorted(unknown))}; there are {', '.join(cases)}"
            raise argparse.ArgumentTypeError(what)
        return names.split(",")

    if cases:
        about = f"cases, separated by commas ({','.join(cases)})"
        arguments.add_argument("--only", type=known, metavar="CASE,...", help=about)
    return arguments


def report(options: argparse.Namespace, figures: dict[str, float], goals: Sequence[Goal]) -> None:
    """Print the table and, if asked, the JSON; end the process."""
    missed = [goal for goal in goals if not goal.is_met(figures)]
    for name, value in figures.items():
        bounds = [f"goal {g.relation} {g.bound:g}" for g in goals if g.figure == name]
        marks = ["MISSED" for g in missed if g.figure == name]
        print(f"{name:<44}{value:>14,.3f}  {' '.join(bounds + marks)}".rstrip())
    if options.json:
        spoken = {"goals": [list(g) for g in goals], "missed": [g.figure for g in missed]}
        print(json.dumps({"figures": figures} | spoken))
    sys.exit(1 if options.check and missed else 0)
