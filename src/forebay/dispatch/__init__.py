"""Subscriptions: which consumer gets which message, and what was acknowledged."""
