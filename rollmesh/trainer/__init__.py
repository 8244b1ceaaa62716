"""The trainer: finished groups become batches, train steps and new policy versions."""
