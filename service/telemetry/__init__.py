"""Facts about a broker and its cluster: metrics, rates, lags, health, lists for the console and the
command line.

metrics              counters of HTTP; the text for Prometheus, of one or several workers
log_metrics          the metrics of the log, read from its counters at each scrape
group_metrics        metrics of consumer groups, by group
kafka_counters       counters of the listener for Kafka's protocol, and their metrics
kafka_clients        the connected Kafka clients of all brokers
compactions          starts the compactions that clients ask for; lists those of all brokers
group_lags           the lags of groups, for the routes and for metrics
lag_times            lag in seconds: the age of the oldest unread record
partition_shares     the share of each topic's hottest partition
maintenance_results  the last result of each kind of maintenance, in the store or in memory
maintenance_metrics  counters of a broker's maintenance, and the metrics of all maintenance
signs                the facts about its health that a broker reports to its peers
health               whether a cluster is well, and if not, why: pure
loop_probe           how long callbacks hold the event loop, in CPU time
rates                records and bytes per second, now and in the last half hour; lag history
"""
