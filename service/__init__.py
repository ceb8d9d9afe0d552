"""The broker: HTTP on top of storage/; and the command line. Keeps nothing that must survive it.

settings        every setting with unit, default and reason; alone reads the environment
main            the composition root: settings in, a running broker out
workers         several brokers on one machine that share the port
protocol        the server's protocol: an answer is one packet
hotpath         produce and fetch as plain ASGI in front of the application
security        who asks, and whether they may: keys, sessions, ACLs, quotas
caller          the caller of a request, as handlers know it
rights          what each route needs
sessions        what a browser carries after a login
quotas          buckets of bytes
app             the application: everything else, health, and the edge that requests pass
http            what the hot handlers need of HTTP
paths           what a request's URL means, and our address as the client sees it
errors          one table: our error, its HTTP status and code
wire_in         JSON bodies of produce requests to columns
wire_arrow      Arrow streams to columns and back
wire_v3         records of the v3 dialect, one by one, from a stream or a batch
wire_transactions  records for several topics and offsets of groups
wire_out        columns to JSON, lines and events; reports of produce
wire_text       columns of values to columns of JSON texts
produce         records in, v2
produce_v3      records in, v3: streams and batches
fetch           records out, with long polls and followers
transactions    records for several topics and offsets of groups, all or nothing
hotdocs         the hot routes as the documentation shows them
consumer_docs   consumer instances as the documentation shows them
topics          topics, partitions and offsets, v2
admin_v3        clusters, topics, partitions in Confluent's v3 dialect
configs_v3      configs of topics in that dialect
groups_v3       consumer groups in that dialect
acls_v3         access control lists in that dialect
keys_api        keys, quotas, and the login of the console
group_resources_v3  the shapes of its resources, and lag
consumers       consumer instances, v2
group_forwarding  their requests on the way to the group's coordinator
wire_consumers  their bodies, in four dialects
resources_v3    the shapes of its resources
telemetry       metrics: what HTTP counts, and the text for Prometheus
log_metrics     what the log counts
tracing         OpenTelemetry traces, where they are wanted
vitals          what brokers do per second, now and in the last half hour
logs            log lines, for people or machines
console         the console's files, in ui/
console_api     what it shows and no other route has
topic_picture   where a topic's records lie, for it
wal_view        the end of the WAL, for it
peers           what a broker answers the others, on a port of their own
peer_client     the way to the others
group_peers     the way of consumer instances' requests to their coordinator
care            retention and collection beside serving: on compaction/, as cli_care
api_reference   API.md's second half, from the OpenAPI document

cli             `tidelog`: serve, and the commands below
cli_client      a broker over HTTP as commands need it: retries, exit statuses
cli_results     how a command ends: statuses, errors of one line, tables or JSON
cli_topics      tidelog topics and tidelog seal
cli_groups      tidelog groups
cli_group_reads tidelog consume --group
cli_access      tidelog keys, acls and quotas
cli_records     tidelog produce and consume: their options
cli_lines       lines of input to records
cli_produce     batches in flight, nothing lost, doubled or swapped
cli_consume     records of partitions, from where to where
cli_care        tidelog retain, compact, collect, scrub, ...: where it meets compaction/
cli_engines     which engine a compaction runs on
cli_replay      tidelog replay: history to files, by Spark
broker_process  a broker as a child process, to kill and start again
demo            a real data set through a real broker and Spark
demo_flights    its data
demo_checks     its promises, each a pure function
"""
