"""Whole clusters in one process, in virtual time, and the judge of the answers to their clients.

history     what clients asked and were answered: events, and their JSON lines
checker     what is wrong with a history: records, order, tables
groupcheck  the same of consumer groups

machine     processes on one event loop: killed, stopped, on virtual time
stores      the bucket, each process's way to it, and what deltalake is to it
world       brokers, the network, and the truth of the chain
clients     producers, readers, members of groups
runs        what a seed tries, and its judgement
foreign     other engines commit to a table
backups     backups of a cluster that works
forks       a log continues from an older state, beside producers of later
damage      objects of the store are damaged; damage_deeds has how
doubled     messages come twice while the store refuses
idle        brokers that beat, write and poll rarely, until something makes them doubt
clones      machines are cloned, and restored from snapshots
finish      the end of a run, when everything must come right
mutations   guards taken out one by one, which the simulator must notice
crashes     death at every await
command     `make sim`

model       the rules against zombies as a small machine, searched to the last state

Histories and checker serve real processes, too: write the same events with the harness's clock.
"""
