"""Messages between processes, their frames, and the ZMQ sockets and keys that carry them."""
