"""Requests to a broker, in no protocol.

The routes of REST and the handlers of Kafka parse a request, call an operation, and render its
result. An operation checks the caller's rights, charges the change, reads the state that is fresh
enough (I3), and waits for the commit within a bound. It raises a `LogError`, which each protocol
has a table for.

Nothing else decides which right a request needs, but the declared access of a route. `rights` has
each of them. Where a request may outlast its right, the handler checks it inline. A plain function
(`is_shown`, `shown`) says what a listing shows to a caller.
"""
