"""The env worker: a process that runs groups of rollouts and delivers their results."""
