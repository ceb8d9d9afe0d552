"""The commands that work on a store. All but `upkeep` open the store themselves: brokers may run,
but the commands do not need them."""
