"""The messages of Kafka's protocol: typed classes, which are also the schema, and their bytes.

`decoder` and `encoder` of `compiler` serve every message; `header` frames them.
"""
