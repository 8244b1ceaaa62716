"""Pacing of the train loop: what is requested, what becomes of each group, which batches train."""
