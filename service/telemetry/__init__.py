"""Metrics of a broker, and rates for the console.

metrics        counters of HTTP and maintenance; the text for Prometheus, of one or several workers
log_metrics    the metrics of the log, read from its counters at each scrape
group_metrics  metrics of consumer groups, by group
kafka_counters  counters of the listener for Kafka's protocol, and their metrics
kafka_clients  the connected clients of Kafka's protocol, of all brokers
compactions    the compactions that clients have started, of all brokers
group_lags     the lags of groups, for the routes and for metrics
loop_probe     how long callbacks hold the event loop, in CPU time
rates          records and bytes per second, now and in the last half hour; lag history
"""
