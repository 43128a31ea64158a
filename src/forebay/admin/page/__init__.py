"""What the page in the browser shows.

assets         the page itself: files in `static/`, served as they are
overview       the document that the page polls, with alerts and rows of jobs
topic          one topic of it: numbers, and ranges of offsets by tier (spans)
topic_states   what is known of each topic now, read cheaply again and again
history        how the store did in the last minutes
watch          the threads behind it: history samples, log events, the store probe
"""
