"""A soak: browser-like agents against real processes, and what their memory does meanwhile.

    python benchmarks/rss_soak.py --minutes 5 --workers 2 --out runs/soak
    python benchmarks/rss_soak.py --minutes 30 --workers 2 --keep 3 --out runs/soak
    python benchmarks/rss_soak.py --shape seed --out runs/seed       each measure's own share
    python benchmarks/rss_soak.py --mode relay --out runs/relay      beside a bare proxy

Agents of 45 turns show a new 0.5 MB screenshot at each, 4 at a time for each worker, in groups of
4; some vanish in mid-stream and ask again, some crash. Invariants: memory is read from outside the
measured processes, and what they had to hold is counted by the agents, which are not in them;
goals are the same however long it runs, but a slope is judged only over 20 waves and 3,000
rollouts. `--out` gets soak.json, soak.md and curves.png. Driven by `make bench BENCH=rss_soak` and
by users.
"""

import argparse
import importlib.util
import sys
import tempfile
from pathlib import Path

if not __package__:
    # As a script: what it imports, and the processes it starts, stand beside its folder.
    sys.path.insert(0, str(Path(__file__).parents[1]))

import os

from benchmarks import _soak_arms, _soak_paper
from benchmarks._soak_load import Shape
from benchmarks.lib.report import parser, report

DEFAULT_MINUTES, QUICK_MINUTES = 5.0, 1.0
SEED_ROLLOUTS = 24


def main() -> None:
    """Soak, write down, judge."""
    options = _options()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    with tempfile.TemporaryDirectory(prefix="rollmesh-soak-") as scratch:
        soaked = _soak_arms.run(options, Path(scratch))
    if options.out is not None:
        _soak_paper.write(soaked, options.out, sys.argv[1:])
    print(_soak_paper.table(soaked))
    report(options, soaked.figures, soaked.goals)


def _options() -> argparse.Namespace:
    arguments = parser("rss_soak")
    add = arguments.add_argument
    add("--minutes", type=float, help=f"of each arm ({DEFAULT_MINUTES:g})")
    add("--rollouts", type=int, help="of each arm in one wave, instead of minutes")
    add("--workers", type=int, default=1, help="workers, or for relay so many times 4 agents (1)")
    add("--keep", type=int, default=0, help="the last K screenshots stay in a history (0: all)")
    add("--blob-mb", type=int, default=0, help="interception.max_blob_bytes in MB (as it is set)")
    add("--mode", choices=("tokens", "relay"), default="tokens")
    add("--shape", choices=("seed",), help="24 rollouts, one worker, with all measures and without")
    add("--ablate", default="", help=f"of {','.join(_soak_arms.MEASURES)}: an arm without each")
    add("--allocators", action="store_true", help="an arm for each way to give memory back")
    add("--seed", type=int, default=0)
    add("--out", type=Path, help="folder for soak.json, soak.md, curves.png")
    options = arguments.parse_args()
    names = [name for name in options.ablate.split(",") if name]
    if unknown := set(names) - set(_soak_arms.MEASURES):
        arguments.error(f"--ablate: no {', '.join(unknown)}; {', '.join(_soak_arms.MEASURES)}")
    if options.out is not None and importlib.util.find_spec("matplotlib") is None:
        arguments.error("--out draws with matplotlib: pip install '.[train]'")
    if options.shape == "seed":
        names, options.workers = names or list(_soak_arms.MEASURES), 1
    options.ablate = names
    compares = names or options.allocators
    if options.minutes is None and options.rollouts is None and compares:
        options.rollouts = SEED_ROLLOUTS
    if options.minutes is None:
        options.minutes = QUICK_MINUTES if options.quick else DEFAULT_MINUTES
    options.load = Shape(keep=options.keep, seed=options.seed)
    return options


if __name__ == "__main__":
    main()
