"""The commands of `tidelog`.

start            the entry point, which loads main
main             the application: the list of all commands, and the command serve
dev              dev: a broker with live data, until Ctrl-C
status           status: whether the cluster is well
client           a connection with a command's options, and its errors as those of commands; SIGTERM
requests         options of client commands; the one request that most of them send
other_words      words of other tools, and what tidelog has for them
results          error lines, JSON, tables, progress, confirmation
topics           topics, seal
defaults         defaults: list, alter
groups           groups: list, describe, lag, reset, export, delete
kafka_clients    clients: the connected Kafka clients
access           keys, acls, quotas
produce_consume  produce, consume: their options and checks; `records` does the work
positions        positions, times, durations and sizes in options
completion       names of topics and groups, for the completion of a shell
records          the work of produce, consume and topics skew
stores           the commands that work on a store: maintenance, repair, replay
"""
