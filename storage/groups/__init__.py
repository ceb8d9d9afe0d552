"""Consumer groups on a broker. The group's state itself is in state/.

coordinator     the coordinator of a group: sessions of members, expiry; Instance
instances       consumer instances: subscribe, read, commit
offset_commits  many members' commits in one commit of the log
rebalances      rebalances by reason, and the time until all members read again
short_lives     the joins of members that come and go wait
portions        what a read of an instance returns
positions       the read position of an instance
pattern_topics  the topics that each pattern finds
patterns        subscriptions by regular expression
"""
