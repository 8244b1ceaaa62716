"""Inference engines: the backend protocol, SGLang's HTTP protocol, the fleet table, and
`embedded/`, a small torch engine that serves the same protocol."""
