"""The cluster state: the result of applying all WAL entries in order. It is pure and the same on
every broker (I4).

    cluster_state      the state, `apply`
    state_checkpoint   the state in a checkpoint
    shares             how much of each bound of the state a principal uses, and may use
    topic_checks       Topic, DeletedTopic; the rule for names, refused actions, owners of topics
    cluster_bounds     view age, WAL retention and file grace: in effect now, in effect later
    elapsed            the elapsed time of the cluster: a lower bound of the time that has passed
    partition          one partition: its offsets, and the index of its tail
    tail_chunks        how many chunks the tails of all topics have, and may have
    producers          ids, epochs and sequences of idempotent producers
    group_types        types of a consumer group and its members
    group_members      membership, generations, assignment
    assignors          range, round robin and sticky assignment
    committed_offsets  committed offsets of consumer groups; the rule for group ids
    access             API keys, ACLs, quotas
    holds              records that stop collection while a backup runs
    outcome            the outcome of a commit or of its retry; idempotency records
    forwarded_drafts   numbers of applied drafts, so that a draft is applied once
"""
