"""Authentication and authorization.

authenticator   Security, a broker's access checks: keys, sessions, ACLs, quotas; Caller
caller          CallerRights, the rights of a caller as handlers see them; the errors 401, 403, 429
oidc            bearer tokens of an OIDC issuer (extra oidc)
session_cookie  the console's session cookies
token_bucket    the token bucket of a rate: bytes, requests or CPU time
request_time    the CPU time of a principal's requests
audit           refusals, logins and changes, as JSON lines
certificates    TLS certificates from files, loaded again if the files change
sites           Host and Origin: names of the broker, pages of other sites
signatures      of messages between brokers
"""
