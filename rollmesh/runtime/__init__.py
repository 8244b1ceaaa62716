"""What lives in a worker: sessions of running rollouts, their token graphs and generations.

Invariant: a session's tokens are exactly what the engines saw and sampled; nothing is tokenised
twice. Driven by the worker (scopes) and by the HTTP edge (calls).
"""
