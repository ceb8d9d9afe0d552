"""HTTP as all routes use it.

admission       connections, clocks and bytes of a listener: pure
call            a request and a response of the hot routes
content_coding  gzip and zstd of bodies and answers
cors            pages of other origins that may use the API
errors          from an error to an HTTP response
exchange        one request and its answer on a connection, without ASGI messages; its flow
media_types     media types, formats inside JSON, refusals of other types
openapi         the OpenAPI document: FastAPI's, with the hot routes and the security of each route
paging          pages of a listing
parameters      parameters of a path, a query and a body: parsers, checks
protocol        uvicorn's server and its connections, bounded by Admission, with and without TLS
request_id      X-Request-Id
route           a route as one declaration: path, handler, access, label, documentation
sockets         sockets to listen on
transports      TLS below a protocol; the count of written bytes
urls            paths, and the URL under which a client reaches this broker
"""
