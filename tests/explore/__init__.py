"""Every choice of a small world, within a bound: `make explore`.

choices   the choices of one run: given ones first, then the first option each time
stage     requests that are under way, and which of them is next with which outcome
world     the simulated world (tests.sim.world) whose store, tables and messages ask the stage
script    what clients, sealer and collection do, from rest to rest
rest      the hash of store, brokers and answers at rest
run       one run of the script with given choices, and its judgement
search    all runs, rest by rest, over processes
mutations the deliberate faults of tests.sim.mutations, and how soon a search finds them
command   `make explore`
"""
