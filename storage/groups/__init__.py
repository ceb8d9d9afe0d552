"""Consumer groups on a broker. The group's state itself is in state/.

coordinator     the coordinator of groups: heartbeats, expiry; Instance, its soft state for a member
rendezvous      which broker coordinates a group
instances       consumer instances: subscribe, read, commit
classic_groups    groups of Kafka's classic protocol: timers, commits, requests that wait
classic_group     the protocol of one such group, as a state machine
classic_roster    the members of one such group
classic_requests  its requests and answers
release         the requests under way, and the release of groups by a broker that stops
offset_commits  many members' commits in one commit of the log
rebalances      counts of rebalances by reason, and the time until all members read again
short_lives     refuses for a time the joins of clients whose members come and go
deliveries      whether the last response of an instance has arrived
portions        the types of the result of an instance's read
positions       the read position of an instance
pattern_topics  keeps the topics that each pattern matches
patterns        matches topic names with a regular expression, by RE2
"""
