"""One broker over HTTP and Kafka's protocol, the console, the Python client, the command line.

The layers of the packages are in pyproject.toml; import-linter checks them.
"""
