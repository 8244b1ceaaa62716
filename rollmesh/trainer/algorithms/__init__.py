"""One train step: advantages, batches, losses, the optimiser, and the report of what it did."""
