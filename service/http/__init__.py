"""HTTP as all routes use it. A hot route is one that the router serves without FastAPI.

admission       which connections a listener keeps, how long, and the bytes that they hold: pure
body_limit      the bytes and JSON values that a body without records may have
call            HttpRequest and HttpResponse, as handlers of the hot routes use them
content_coding  gzip and zstd of bodies and answers
cors            CORS: pages of other origins that may use the API
errors          from an error to an HTTP response
exchange        one request and its answer on a connection: written bytes, flow control
handshakes      TLS handshakes of an event loop, and the memory that they take
media_types     media types and their refusals; formats in JSON: json, binary, text
openapi         the OpenAPI document: FastAPI's, with the hot routes and the security of each route
paging          pages of a listing; work in slices, between which other callbacks run
parameters      parameters of a path, a query and a body: parsers, checks
protocol        uvicorn's connections, bounded by Admission, with and without TLS
request_id      the header X-Request-Id
route           a route as one declaration: path, handler, access, label, documentation
sockets         uvicorn's server; sockets to listen on; the reason if a broker cannot listen
transports      TLS below a protocol; the written bytes, and whether an answer has arrived
turns           work of many connections that would take the event loop: the turns of their owners
urls            a path in one spelling; the URL under which a client reaches this broker
"""
