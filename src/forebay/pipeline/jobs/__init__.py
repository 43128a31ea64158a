"""The jobs: offload, compact, verify, restore, export, replay.

waves        runs the items of a job in waves, between its plan and its commits
report       the rows of a job as a DataFrame
continuous   runs offloads in cycles until it is stopped
verify_plan  the pure decisions of `verify`
"""
