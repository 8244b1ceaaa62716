"""Transports that load weights into engines without a file, and SGLang call sequences."""
