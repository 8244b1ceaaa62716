"""Who may use the fleet: pipelines are registered, admitted, killed and forgotten.

Owns the fleet file, and a process that holds nothing: what it does stands in the scheduler's
journal. Driven by `rollmesh scheduler admission` and by the verbs that ask it.
"""
