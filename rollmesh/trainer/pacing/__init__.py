"""When to ask for rollouts and which to train: the pacer, its tasks, the room of samples, age."""
