"""Model folders: reading, writing and their file layout; the demo's tiny model."""
