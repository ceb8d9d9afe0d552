"""Metrics of a broker, and rates for the console.

metrics        HTTP counters, and the text for Prometheus
log_metrics    counters of the log
group_metrics  metrics of consumer groups, by group
group_lags     the lags of groups, for the routes and for metrics
loop_probe     how long callbacks hold the event loop, in CPU time
rates          records and bytes per second, now and in the last half hour; lag history
"""
