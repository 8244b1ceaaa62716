"""Savepoints: all that a trainer must find again, on disk beside the step, whole or not there.

    state.py      what the loop knows, as plain values
    imprint.py    one rank's part: copied at once, written beside the steps, read back
    slots.py      which rows of each tensor a rank has
    tray.py       the copy, and where in the files its bytes belong (safetensors_layout.py)
    chance.py     the states of the random generators
    manifest.py   what a savepoint consists of; the proof that it is whole
    shelf.py      the run's savepoints: begun, sealed, found, pruned

Driven by the train loop; each rank writes and reads its own part.
"""
