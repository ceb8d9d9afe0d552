"""Whole clusters in one process and in virtual time, and the judge of what their clients were told.

history     what clients asked and were answered: events, and their JSON lines
checker     what is wrong with a history: records, order, tables
groupcheck  the same of consumer groups

The checker serves real processes, too: write the same events with the harness's own clock.
"""
