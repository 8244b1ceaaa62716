"""Generations: the state machine of a turn, the sampler that runs it, sampling parameters."""
