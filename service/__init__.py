"""One broker over HTTP, the console, and the command line `tidelog`.

Modules and packages. Each one imports only what stands above it in this list, which import-linter
checks (pyproject.toml).

    quantities      durations and sizes as text
    client          the Python client; tidelog.client has its public names
    exit_status     exit statuses of brokers and commands
    memory_pool     bytes within a limit that principals share
    unpacking       the threads that unpack and check what clients send
    setting_fields  a setting as a field of a dataclass, with default, documentation and check
    secret_files    secrets in files
    drain_settings  that field of `Settings` that concerns the drain before the end of a broker
    kafka_settings  those fields of `Settings` that concern the listener for Kafka's protocol
    trust_settings  those fields of `Settings` that concern host names, TLS, OIDC and the audit log
    settings        every setting: unit, default, reason; no other module reads the environment
    http            requests, responses, errors, URLs, the HTTP/1.1 protocol
    formats         conversion of request and response bodies to and from columns
    telemetry       metrics and rates
    security        authentication, authorization, sessions, quotas
    peers           requests between brokers, on a port of their own
    routes          the routes of the API
    kafka           Kafka's own protocol: messages, connections, handlers
    console         the console: files and its API
    server          builds a broker from its settings, and runs it
    cli             the commands
"""
