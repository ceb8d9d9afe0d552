"""Copies of a running cluster, and new clusters from them (DESIGN 8).

place    the layout of a store with backups: copied objects, manifests
backup   copies a cluster under a hold
prune    removes old backups from a place
restore  makes a cluster in an empty store
"""
