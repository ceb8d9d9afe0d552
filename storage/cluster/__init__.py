"""Brokers among each other.

liveness    which brokers are live, ranked; Member, MembershipSettings
membership  this broker's liveness object, and the tracker of the others'
messages    forwarded drafts and announcements: their bytes; several drafts as one
announcer   sends announcements of committed entries to the peers
sequencer   forwards drafts to the sequencer, or commits as the sequencer
secret      the cluster's secret, readable by brokers only
"""
