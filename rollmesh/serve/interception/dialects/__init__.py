"""The HTTP APIs that agents use: one file for each, registered in registry.py."""
