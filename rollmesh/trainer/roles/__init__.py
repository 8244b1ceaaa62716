"""Roles of the field's recipes, for the train controller: PPO, GRPO, DPO, SFT, reward models.

    recipes.py                    what one step of each recipe calls, in a few lines
    language.py, scalar.py        the two roles: log-probs, and a number for each token or text
    learner.py, rows.py           what both stand on: one shared model, rows packed without padding
    losses.py, returns.py, divergence.py    pure formulas with their sources

Invariant: a mean is over the trained tokens, or the pairs, of all ranks, so that their number
changes nothing but the time a step takes; rows of padding weigh nothing. Driven by whoever owns a
TrainController; docs/howto/ranks.md has the table of methods and rows.
"""
