"""What a run writes of itself: rows, drops and why, what a policy selects against, a picture."""
