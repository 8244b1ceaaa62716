"""Typed messages between processes; the only room that imports zmq."""
