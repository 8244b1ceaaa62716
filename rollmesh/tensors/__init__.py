"""RTensor: handles travel, bytes move once to who needs them, and are gone when the step ends."""
