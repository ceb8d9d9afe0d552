"""Settings of log lines and traces."""

import dataclasses

from tidelog.service.settings.fields import Section, setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class TelemetrySettings(Section):
    """Log lines and traces of a broker."""

    log_level: str = setting(
        "minimum level of log lines", default="info", words="debug info warning error"
    )
    traces: str = setting(
        "`otlp` sends OpenTelemetry traces (needs `tidelog[otel]`); the standard OTEL_ variables set endpoint and sampling",
        default="none",
        words="none otlp",
    )
    log_format: str = setting(
        "`human`: text lines; `json`: one JSON event a line", default="human", words="human json"
    )
