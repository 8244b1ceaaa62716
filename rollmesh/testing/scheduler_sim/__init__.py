"""The scheduler, its coordinators and pipelines in one process on a virtual clock.

The step machines that the processes run are joined here over mesh_sim's faulty network. checks.py
looks at everything after each event. Seeds that found a fault are kept in
tests/sim/test_scheduler.py.
"""
