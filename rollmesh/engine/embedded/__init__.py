"""A small torch engine behind SGLang's native HTTP routes, for machines without an SGLang.

Invariant: it lives in a process of its own (`python -m rollmesh.engine.embedded`), and no slim
process imports it. Three small objects pass one Request: Scheduler, Memory, Runner; Engine.step
drives them.
"""
