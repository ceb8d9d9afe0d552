"""HTTP as all routes use it.

accept          the Accept of requests that change something
call            a request and a response of the hot routes
route           a route as one declaration: path, handler, access, label, documentation
content_coding  gzip and zstd of bodies and answers
cors            pages of other origins that may use the API
errors          from an error to an HTTP response
request_id      X-Request-Id
openapi         the OpenAPI document: FastAPI's, with the hot routes and the security of each route
protocol        uvicorn's server; head and body in one packet, offers of another protocol ignored
urls            paths, and the URL under which a client reaches this broker
"""
