"""Bodies of requests and responses, to and from columns.

bodies          base classes of bodies: unknown fields are refused
json_in         v2 JSON produce bodies to columns
json_out        columns to JSON arrays, NDJSON, server-sent events; v2 produce reports
json_text       columns of values to columns of JSON texts; the error Undecodable
events          lines and events of followers, beside the records
pages           pages of an answer; `on_error`: stop, skip or raw for records that do not decode
record_formats  parameters of reads: format, `on_error`, `reset`; the documentation of a record
shared_pages    encoded pages that several readers use
json_numbers    numbers that most readers of JSON refuse
arrow           Arrow streams to columns and back
schemas         errors of requests that need a schema registry
v3_records      records of the v3 dialect
transactions    atomic requests: records for several topics and offsets of groups
consumers       bodies of consumer instances, in four dialects
resources_v3    resource objects of v3, but those of groups and ACLs (routes)
"""
