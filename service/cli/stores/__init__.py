"""The commands that open a store themselves, beside brokers or without any.

maintenance      retain, delete-records, compact, collect, maintain
scrub            scrub: verifies the log, and records the result
repair           repair, upgrade, bounds, backup, restore
on_store         runs the work of a command on a store, shows progress and result
engines          the engine of a compaction
replay           writes a topic's history to files, with Spark
upkeep           delete-records and compact by a broker; compactions
store_options    --store and --master, and the settings that follow from --store
"""
