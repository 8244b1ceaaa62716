"""The APIs that agents speak; one file each."""
