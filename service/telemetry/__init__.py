"""Metrics of a broker, and rates for the console.

metrics      HTTP counters, and the text for Prometheus
log_metrics  counters of the log, and the lags of groups
loop_probe   how long callbacks hold the event loop, in CPU time
rates        records and bytes per second, now and in the last half hour; lag history
"""
