"""The routes of the API, by dialect. Each module declares its routes in `ROUTES`.

produce             records in, v2; checks and idempotency keys of all produce routes
produce_v3          records in, v3: streams and batches
fetch               records out: long polls, followers of one partition
followers           records out: followers of all partitions of a topic
transactions        records and group offsets, all or nothing
consumers           handlers of consumer instances, v2
consumer_routes     the routes of consumer instances
topics              topics, partitions, offsets, brokers, v2; the seal
cluster_v3          clusters and brokers, v3
topics_v3           topics, partitions, offsets, v3
configs_v3          configs of topics, v3
groups_v3           consumer groups, v3: members, lag, reset of offsets, deletion
acls_v3             access control lists, v3
keys                API keys, quotas, the console's login, logout and /me
upkeep              deletion of records, compactions, what retention would delete
health              health, metrics, version, the OpenAPI document
dependencies        what FastAPI's handlers share: state, rights, parameters, errors
group_resources_v3  resource objects of groups, and lag
"""
