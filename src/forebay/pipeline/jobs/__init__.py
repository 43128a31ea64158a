"""The jobs: offload, compact, verify, restore, export, replay.

`waves` is what they share between plan and commit, `report` their rows as a DataFrame; `continuous`
runs offloads for ever, and `verify_plan` holds the pure decisions of `verify`.
"""
