"""One broker over HTTP, the console, and the command line `tidelog`.

Packages, lower ones first; import-linter checks that a package imports only lower ones
(pyproject.toml).

    exit_status     exit statuses of brokers and commands
    setting_fields  a setting as a field of a dataclass: default, documentation, check
    secret_files    secrets in files
    trust_settings  the settings of names, TLS, OIDC and audit log, which `Settings` has as fields
    settings        every setting: unit, default, reason; no other module reads the environment
    http            requests, responses, errors, URLs, the HTTP/1.1 protocol
    formats         request and response bodies to and from columns
    telemetry       metrics and rates
    security        authentication, authorization, sessions, quotas
    peers           requests between brokers, on a port of their own
    routes          the routes of the API
    console         the console: files and its API
    server          the composition of a broker: settings in, a running server out
    cli             the commands
"""
