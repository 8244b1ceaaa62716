"""What a trainer goes on with after it died: a plan from the savepoint and the journal."""
