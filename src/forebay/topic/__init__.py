"""Topics: what the rest of the system holds of a log."""
