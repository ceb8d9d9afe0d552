"""One broker over HTTP and Kafka's protocol, the console, the Python client, and the command line
`tidelog`. The layers of the packages are in pyproject.toml; import-linter checks them.
"""
