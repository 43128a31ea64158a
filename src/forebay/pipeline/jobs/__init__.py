"""The jobs: offload, compact, verify, restore, export, replay."""
