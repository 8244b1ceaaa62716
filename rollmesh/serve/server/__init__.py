"""The env worker: a process that runs groups of rollouts and delivers what they leave behind."""
