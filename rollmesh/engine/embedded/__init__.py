"""A small torch engine behind SGLang's native HTTP routes, for machines without SGLang.

It runs in a process of its own (`python -m rollmesh.engine.embedded`); processes without torch
never import it.
"""
