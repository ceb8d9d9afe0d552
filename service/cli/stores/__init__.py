"""The commands that work on a store. All but `upkeep` open the store themselves: brokers may run,
but the commands do not need them.

maintenance      retain, delete-records, compact, collect, maintain
upkeep           delete-records and compact with --server: a broker does the work; compactions
scrub            scrub: verifies the log, and stores the result for `tidelog status`
repair           repair, upgrade, bounds, backup, restore
replay           replay: writes a topic's records to files, with Spark
on_store         opens the store for the work of a command, shows progress and result
engines          the engine of a compaction: this process or Spark
store_options    --store, --server and --master, and the settings that follow from --store
"""
