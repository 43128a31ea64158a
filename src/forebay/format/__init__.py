"""Encodes and decodes the byte formats of `docs/formats/`. Nothing here does I/O."""
