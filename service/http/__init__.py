"""HTTP as all routes use it.

call       a request and a response of the hot routes
route      a route as one declaration: path, handler, access, label, documentation
errors     from an error to an HTTP response
openapi    the OpenAPI document: FastAPI's, with the hot routes and the security of each route
admission  connections, clocks and bytes of a listener: pure
protocol   uvicorn's server, bounded by Admission; head and body in one packet, offers ignored
sockets    sockets to listen on
urls       paths, and the URL under which a client reaches this broker
"""
