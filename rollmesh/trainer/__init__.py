"""From finished groups to new weights: advantages, batches, loss, steps, and the demo's model."""
