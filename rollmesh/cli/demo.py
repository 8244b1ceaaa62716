"""`rollmesh demo`: makes a tiny model and trains it to guess numbers, all on this machine.

Owns the demo's settings. Invariant: nothing is downloaded and no GPU is needed; what the policy
knew before training is said. Driven by people and by `make demo`.
"""

from pathlib import Path
from typing import Any

import msgspec

from rollmesh.cli.make_model import is_made
from rollmesh.cli.options import add_no_keys, add_set, add_share, add_view, parser, share_of
from rollmesh.cli.resume import add_resume, resume_command, settings_of
from rollmesh.core.config import Config
from rollmesh.launch.run import RunOptions, launch

SETTINGS: dict[str, Any] = {
    "env": "guess",
    "run": {"name": "demo"},
    "model": {"max_context_tokens": 512},
    "sampling": {"max_tokens": 16},
    "trainer": {
        "eval_rollouts": 1000,
        "num_steps": 100,
        "device": "cpu",
        "learning_rate": 5e-4,
        "entropy_coef": 0.01,
        "max_importance_weight": 2.0,
    },
}

ABOUT = """\
A tiny Qwen3-shaped model (100k parameters) learns to guess a number from 1 to 7 in three guesses.
It is made now: random weights, then a few seconds of supervised warm start on games played at
random but consistently with the hints, which win about 68 %. Reinforcement learning must find
binary search, which always wins. One engine, one router, two workers, one trainer, one page."""


def main(argv: list[str]) -> int:
    """Train while the user watches; the exit code."""
    arguments = parser("demo", "Train a tiny agent by reinforcement learning on this machine.")
    arguments.add_argument("--seed", type=int, help="of weights, tasks and sampling (0)")
    arguments.add_argument("--ranks", type=int, help="processes that train together (1)")
    arguments.set_defaults(config=None)
    add_share(arguments)
    add_resume(arguments)
    add_set(arguments)
    add_no_keys(arguments)
    add_view(arguments)
    options = arguments.parse_args(argv)
    if options.seed is not None:
        options.overrides.append(f"run.seed={options.seed}")
    if options.ranks is not None:
        options.overrides.append(f"trainer.num_ranks={options.ranks}")
    config = with_model(settings_of(options, SETTINGS))
    is_there = options.resume and is_made(Path(config.model.path))
    make_model = ("make-model", config.model.path, "--seed", str(config.run.seed))
    order = RunOptions(
        config=config,
        make_model=() if is_there else make_model,
        is_live=options.is_live,
        has_keys=options.has_keys,
        about="" if is_there else ABOUT,
        resume=options.resume,
        share=share_of(options),
        resume_command=resume_command("demo", argv),
    )
    return launch(order)


def with_model(config: Config) -> Config:
    """The model stands in the run's own folder."""
    path = str(config.run_folder() / "model")
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=path))
