"""How the brokers of a cluster find each other, and which of them commits.

liveness    which brokers are live, ranked; Member, MembershipSettings
membership  writes this broker's liveness object, and finds the live peers
messages    bytes of forwarded drafts and of announcements; one draft made of several
announcer   announces committed entries; finds out whether suspects answer again; PeerTransport
peer_beats  asks the peers whether they answer; who does not is out of Kafka's Metadata soon
sequencer   forwards drafts to the sequencer, or commits as the sequencer
secret      the cluster's secret, readable by brokers only
"""
