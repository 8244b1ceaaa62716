"""The engine room: SGLang's native protocol, who of the fleet may be used, and a small stand-in.

client.py speaks to one server, fleet.py is the table that the router keeps of all of them, view.py
is a worker's copy of it; embedded/ is the tiny torch engine behind the same HTTP face.
"""
