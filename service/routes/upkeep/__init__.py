"""The routes for the upkeep of topics without rights on the object store.

topic   deletion of records, compactions
expiry  what a change of configs would make retention delete
"""
