"""Records and figures of a run, and measurements of how exact its samples are."""
