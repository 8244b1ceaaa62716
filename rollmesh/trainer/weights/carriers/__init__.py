"""Ways by which a policy version's weights come to engines: a file, memory of the host, a group."""
