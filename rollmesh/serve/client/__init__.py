"""The one way in and out of the mesh: asks go to the router, results come to this client's sink.

Used by the trainer, by evaluations and by users' own code; `client.RolloutClient` is the door.
"""
