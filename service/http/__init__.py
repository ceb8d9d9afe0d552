"""HTTP as all routes use it.

call      a request and a response of the hot routes
route     a route as one declaration: path, handler, access, label, documentation
errors    from an error to an HTTP response
openapi   the OpenAPI document: FastAPI's, with the hot routes and the security of each route
protocol  uvicorn's server; head and body in one packet, offers of another protocol ignored
urls      paths, and the URL under which a client reaches this broker
"""
