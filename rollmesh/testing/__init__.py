"""Public fakes for tests and benchmarks: scripted services behind real sockets, and simulators.

No shipped package imports this one.
"""
