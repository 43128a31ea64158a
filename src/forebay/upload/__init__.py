"""Uploads segments as objects (plan, transfer, commit), removes orphans, and restores topics."""
