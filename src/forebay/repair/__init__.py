"""What is damaged in a store and can be put right: survey, plan and apply.

repair   the whole: one topic after the other      frames   runs of valid frames, anywhere
survey   what is in a log's directory              plan     what to do about it, decided purely
apply    files and objects written again
"""
