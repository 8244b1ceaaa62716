"""The fleet's machines: what says of each that it is there.

Owns the node agent, and its way into a Ray cluster. Driven by `rollmesh scheduler agent` and
`rollmesh scheduler ray`.
"""
