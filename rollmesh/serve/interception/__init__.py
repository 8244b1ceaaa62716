"""The HTTP edge that agents talk to: authenticate, decode, match, sample, stream back.

Invariant: a handler owns nothing that outlives its connection; sessions and generations belong to
the runtime. Driven by the worker process.
"""
