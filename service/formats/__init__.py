"""Bodies of requests and responses, to and from columns.

bodies          base classes of bodies, which refuse unknown fields
json_in         v2 JSON produce bodies to columns; BadBody and InvalidBody, the errors of all bodies
json_out        columns to JSON arrays, NDJSON, server-sent events; v2 produce reports
json_text       columns of values to columns of JSON texts; the error Undecodable
events          streams of followers: event ids; events and lines that are no records
pages           encoded records of a partition; `on_error` for a record that does not decode
fetched         the records of a fetch, as read and as encoded
record_formats  parameters of all reads: format, `on_error`, `reset`; the documentation of a record
page_bounds     upper bounds of the bytes of encoded pages, before they are encoded
shared_pages    encoded pages that several readers use
json_numbers    JSON numbers beyond the range of a double, which are refused
json_blocks     large JSON texts in blocks without the contents of strings
arrow           Arrow streams to columns and back
arrow_messages  the memory of an Arrow stream by its messages' metadata; the budget of its decoding
schemas         errors of requests that need a schema registry, which tidelog does not have
v3_records      records of the v3 dialect
transactions    atomic requests: records for several topics and offsets of groups
consumers       bodies of consumer instances, in four dialects
resources_v3    resources of v3, except groups and ACLs (service/routes)
"""
