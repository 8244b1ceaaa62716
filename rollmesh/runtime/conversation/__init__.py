"""The conversation of a session: message history, token graph, shared prefixes and forks."""
