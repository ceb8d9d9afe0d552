"""`tidelog` with values of the log that are no settings: `python tuned_cli.py TUNING COMMAND ...`.

TUNING is JSON with fields of the parts of LogSettings: `{"wal": {"checkpoint_entries": 2}}`; below
"service", with class constants of Settings: `{"service": {"connections_max": 20}}`.
"""

import json
import sys

from tidelog.service.cli.main import main
from tidelog.service.settings.settings import Settings
from tidelog.storage.core.log_settings import LogSettings


def tune(tuning: dict[str, dict[str, float]]) -> None:
    for name, value in tuning.pop("service", {}).items():
        setattr(Settings, name, value)
    untuned = Settings.log_settings

    def log_settings(self: Settings) -> LogSettings:
        settings = untuned(self)
        parts = {
            part: getattr(settings, part)._replace(**fields) for part, fields in tuning.items()
        }
        return settings._replace(**parts)

    Settings.log_settings = log_settings  # type: ignore[method-assign]


if __name__ == "__main__":
    tune(json.loads(sys.argv.pop(1)))
    sys.exit(main())
