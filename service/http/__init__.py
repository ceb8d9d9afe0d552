"""HTTP as all routes use it. A hot route is one that the router serves without FastAPI."""
