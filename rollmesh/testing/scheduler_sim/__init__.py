"""The scheduler, its coordinators and pipelines in one process on a virtual clock.

The same step machines that the processes run are joined here over mesh_sim's network, which
misbehaves as its seed says. Invariant: after every event the witness looks at all of it. A seed
that broke something is kept in tests/sim/test_scheduler.py.
"""
