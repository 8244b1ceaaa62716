"""The whole mesh in one process on a virtual clock, over a seeded faulty network.

Nodes carry out the actions of the step machines that the processes run (group scheduler, asks,
outbox, sink, fleet, generation, publisher, staleness). checks.py looks at everything after each
event. Seeds that found a fault are kept in tests/sim.
"""
