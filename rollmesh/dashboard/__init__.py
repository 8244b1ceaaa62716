"""The live page and trajectory viewer: a reader of the run folder, of a running or a finished run.

It starts nothing, asks nobody and writes nothing; what it shows stands in files. It knows neither
the router nor the trainer, so a run that died is read as well as one that lives.
"""
