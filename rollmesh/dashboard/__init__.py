"""The live dashboard and trajectory viewer: a reader of a run folder, whether the run is running or
not.

It starts nothing, writes nothing and contacts neither router nor trainer; all that it shows is read
from files.
"""
