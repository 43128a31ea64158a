"""Bytes to values and back. Nothing here does I/O; `docs/formats/` holds the layouts."""
