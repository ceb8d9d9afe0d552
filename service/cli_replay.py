"""`tidelog replay`."""

from service.cli_topics import JsonOption, TopicArgument


def replay(topic: TopicArgument, as_json: JsonOption = False) -> None:
    """Replay."""
