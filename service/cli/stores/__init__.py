"""The commands that open a store themselves, beside brokers or without any.

maintenance      retain, delete-records, compact, collect, maintain; runs work on a store
scrub            scrub: verifies the log, and records the result
repair           repair, upgrade, bounds, backup, restore
engines          the engine of a compaction
replay           writes a topic's history to files, with Spark
store_options    --store and --master, and the settings that follow from --store
"""
