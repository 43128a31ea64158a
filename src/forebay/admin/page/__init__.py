"""What the page in the browser shows.

assets         the page itself: files in `static/`, served as they are
overview       the document that the page polls, with alerts and rows of jobs
topic          one topic of it: numbers, and ranges of offsets by tier (spans)
topic_states   the current state of each topic, cheap to read repeatedly
history        how the store did in the last minutes
watch          the threads behind it: history samples, log events, the store probe
"""
