"""Start the processes of a mesh, supervise them, and leave none behind.

Rooms are started by argv and known by what they report; launch imports none of them.
"""
