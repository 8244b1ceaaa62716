"""One controller, N rank processes: handles travel to them, tensors go where they are needed."""
