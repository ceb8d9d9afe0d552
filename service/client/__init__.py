"""The Python client of tidelog: `tidelog.client` has the public names.

A program with only the base distribution can use it. So it imports only the dependencies of that
distribution, and two other modules of tidelog, which are plain Python:
`storage.codec.key_partition`, because client and broker must choose the same partition for a key,
and `storage.core.model`. import-linter checks this.
`poll_arrow` imports pyarrow when it is called.

The logic is asynchronous and exists once. The module `blocking` runs it in a thread for callers
without an event loop.
"""
