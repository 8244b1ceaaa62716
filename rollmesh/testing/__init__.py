"""Public fakes for tests and benchmarks: what stands at the other end of a socket, scripted.

No shipped room imports this one.
"""
