"""Authentication and authorization.

authenticator  keys, sessions, ACLs and quotas of this broker's callers
caller         the caller of a request, as handlers see it
sessions       the console's session cookies
quotas         token buckets
"""
