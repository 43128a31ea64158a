"""Reads messages from objects, and from objects and the local log as one log."""
