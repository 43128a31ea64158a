"""From objects to readers, and one reader over objects and the log."""
