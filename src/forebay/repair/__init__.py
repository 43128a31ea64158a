"""Finds damage in a store and repairs it: survey, plan, apply.

repair   runs all steps, one topic at a time       frames   finds runs of valid frames
survey   reads a log's directory                   plan     decides what to do, without I/O
apply    writes files and objects again
"""
