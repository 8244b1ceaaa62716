"""How exact the recorded log-probs are, by engine and dialect, and which engines lie."""
