"""The train controller: one process calls methods of roles that run in many rank processes."""
