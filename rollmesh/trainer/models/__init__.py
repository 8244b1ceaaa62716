"""Models on the disk: read, write, lay out; and the demo's tiny one, made here."""
