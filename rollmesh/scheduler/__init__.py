"""Several pipelines on one GPU fleet: who has which GPUs, when.

Owns GPU ownership, which lives in its journal. The planner is pure; the service carries its plans
out; admission is a process apart. Driven by `rollmesh scheduler`.
"""
