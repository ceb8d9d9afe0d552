"""How the brokers of a cluster find each other, and which of them commits."""
