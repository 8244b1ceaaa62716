"""Roles of common recipes for the train controller: PPO, GRPO, DPO, SFT and reward models.

    recipes.py                  one step of each recipe, as a few calls of roles
    models.py                   the two roles: log-probs, and a number for each token or row
    learner.py                  their common base: one sharded model, rows packed without padding
    losses.py                   pure formulas with their sources

- A mean is over the trained tokens, or pairs, of all ranks, so the number of ranks changes only the
  duration of a step. Padding rows have weight 0.
"""
