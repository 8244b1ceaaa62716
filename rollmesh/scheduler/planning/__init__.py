"""The planner: what is to be done with the GPUs, given who has them and who wants them.

Owns no clock, no socket and no file. Driven by the service's machine and by the simulator.
"""
