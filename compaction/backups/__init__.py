"""Copies of a running cluster, and new clusters from them (DESIGN 8).

place    a store with backups: its keys, manifests and copied objects; bounds the rate of reads
backup   copies a cluster under a hold
prune    removes old backups from a place
restore  makes a cluster in an empty store
"""
