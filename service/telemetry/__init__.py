"""Metrics of a broker, and rates for the console.

metrics        counters of HTTP; the text for Prometheus, of one or several workers
log_metrics    the metrics of the log, read from its counters at each scrape
group_metrics  metrics of consumer groups, by group
kafka_counters  counters of the listener for Kafka's protocol, and their metrics
kafka_clients  the connected clients of Kafka's protocol, of all brokers
compactions    the compactions that clients have started, of all brokers
group_lags     the lags of groups, for the routes and for metrics
lag_times      lag in seconds: the age of the oldest unread record
partition_shares  the share of each topic's hottest partition
maintenance_results  results of maintenance, of commands and of brokers
maintenance_metrics  counters of a broker's maintenance, and their metrics
signs          signs of a broker's health, which it reports to its peers
health         whether a cluster is well, and if not, why: pure
loop_probe     how long callbacks hold the event loop, in CPU time
rates          records and bytes per second, now and in the last half hour; lag history
"""
