"""HTTP server for agents: authenticates, decodes, matches histories, samples and streams answers.

A handler owns nothing that outlives its connection; sessions and generations belong to the runtime.
"""
