"""From segments to objects: plan, transfer, commit; and what to do with what was left behind."""
