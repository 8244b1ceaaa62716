"""Model folders: reading, writing and their file layout; the device; the demo's tiny model."""
