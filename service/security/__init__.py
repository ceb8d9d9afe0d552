"""Authentication and authorization.

authenticator  keys, sessions, ACLs and quotas of this broker's callers
caller         the caller of a request, as handlers see it
sessions       the console's session cookies
quotas         token buckets
audit          refusals, logins and changes, as JSON lines
sites          Host and Origin: names of the broker, pages of other sites
signatures     of messages between brokers
"""
