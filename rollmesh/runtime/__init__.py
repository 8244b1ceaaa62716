"""Runtime of a worker: sessions of running rollouts, their token graphs and their generations.

A session's tokens are exactly those that engines received and sampled; nothing is tokenised twice.
"""
