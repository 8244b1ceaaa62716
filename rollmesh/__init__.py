"""Agent rollouts for reinforcement learning of language models."""
