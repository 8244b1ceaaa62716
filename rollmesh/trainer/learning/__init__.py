"""From a batch of samples to a step of the optimiser: advantages, attention, losses, descent."""
