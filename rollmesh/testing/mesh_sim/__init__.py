"""The whole mesh in one process on a virtual clock, over a seeded network that misbehaves.

The same step machines that the processes run (ledger, asks, outbox, sink, fleet, generation,
publisher, staleness) are joined here by nodes that carry out their actions. After every event
checks.py looks at all of it. A seed that broke something is kept in tests/sim.
"""
