"""Words of other tools, and what `tidelog` has for them: the one table of these hints.

A hint goes at the end of the error about an unknown command or option. Back-quotes mark what the
user can type, and a test types it.
"""

import re
from collections.abc import Mapping

COMMANDS: Mapping[str, str] = {
    "brokers": "`tidelog status` shows the brokers",
    "config": "`tidelog topics alter` and `tidelog defaults` have the configs",
    "configs": "`tidelog topics alter` and `tidelog defaults` have the configs",
    "create": "`tidelog topics create` creates a topic",
    "delete": "`tidelog topics delete` deletes a topic",
    "describe": "`tidelog topics describe` describes a topic",
    "health": "`tidelog status` shows whether the cluster is well",
    "help": "`tidelog --help` lists the commands, and each command has --help",
    "info": "`tidelog status` shows the cluster",
    "lag": "`tidelog groups list` shows the lag",
    "list": "`tidelog topics list` lists the topics",
    "login": "there is no session: give the key with `tidelog --key-file`, or in TIDELOG_KEY",
    "logout": "there is no session to end: a key is valid until `tidelog keys delete`",
    "logs": "a broker writes its log to stderr",
    "ls": "`tidelog topics list` lists the topics",
    "run": "`tidelog serve` runs a broker",
    "server": "`tidelog serve` runs a broker",
    "start": "`tidelog serve` runs a broker",
    "stop": "a broker stops at SIGTERM or Ctrl-C",
    "users": "`tidelog keys list` lists the keys of principals",
    "version": "`tidelog --version` prints the version",
}
"""By the first word after `tidelog`."""

_SERVER = "`--server` takes the URL of a broker's HTTP port, such as http://127.0.0.1:8082"
_CREDENTIALS = "the key is in `tidelog --key-file` or TIDELOG_KEY, the CA in `tidelog --ca-file`"
_ARGUMENT = "the topic is an argument without an option"
OPTIONS: Mapping[tuple[str, str], str] = {
    ("", "--bootstrap-server"): _SERVER,
    ("", "--bootstrap-servers"): _SERVER,
    ("", "--broker-list"): _SERVER,
    ("", "--brokers"): _SERVER,
    ("", "--command-config"): _CREDENTIALS,
    ("", "--consumer.config"): _CREDENTIALS,
    ("", "--producer.config"): _CREDENTIALS,
    ("", "--zookeeper"): _SERVER,
    ("consume", "--from-beginning"): "`--from beginning` is the default",
    ("consume", "--group-id"): "`--group` names the group",
    ("consume", "--key"): "`--key-separator` prints the keys",
    ("consume", "--max-messages"): "`--max` bounds the records",
    ("consume", "--offset"): "`--from` takes an offset",
    ("consume", "--topic"): _ARGUMENT,
    ("consume", "-b"): _SERVER,
    ("consume", "-c"): "`--max` bounds the records",
    ("consume", "-o"): "`--from` takes an offset",
    ("consume", "-t"): _ARGUMENT,
    ("groups describe", "--group"): "the group is an argument without an option",
    ("groups reset", "--all-topics"): "without `--topic`, all topics are reset",
    ("groups reset", "--execute"): "offsets are set unless there is `--dry-run`",
    ("groups reset", "--group"): "the group is an argument without an option",
    ("groups reset", "--offset"): "`--to` takes an offset",
    ("groups reset", "--shift-by"): "`--by` moves the offsets",
    ("groups reset", "--to-datetime"): "`--to @2026-01-31T12:00:00Z` is a time",
    ("groups reset", "--to-earliest"): "`--to beginning` is the earliest offset",
    ("groups reset", "--to-latest"): "`--to end` is the latest offset",
    ("groups reset", "--to-offset"): "`--to` takes an offset",
    ("produce", "--key"): "`--key-separator` splits each line into key and value",
    ("produce", "--topic"): _ARGUMENT,
    ("produce", "-K"): "`--key-separator` splits each line into key and value",
    ("produce", "-b"): _SERVER,
    ("produce", "-k"): "`--key-separator` splits each line into key and value",
    ("produce", "-t"): _ARGUMENT,
    ("topics", "--create"): "`tidelog topics create` creates a topic",
    ("topics", "--delete"): "`tidelog topics delete` deletes a topic",
    ("topics", "--describe"): "`tidelog topics describe` describes a topic",
    ("topics", "--list"): "`tidelog topics list` lists the topics",
    ("topics alter", "--add-config"): "`--config` sets a config",
    ("topics alter", "--delete-config"): "`--unset` resets a config",
    ("topics alter", "--topic"): _ARGUMENT,
    ("topics create", "--replication-factor"): "leave it out, because the object store replicates",
    ("topics create", "--topic"): _ARGUMENT,
    ("topics delete", "--topic"): _ARGUMENT,
    ("topics describe", "--topic"): _ARGUMENT,
}
"""By command and option; the command "" stands for every command."""

_UNKNOWN = re.compile(r"No such (command|option:) '?([^\s']+?)'?(?: \(|\. |$)")


def hint_of(path: str, message: str) -> str:
    """Return the hint about an error of the command `path`, such as `tidelog topics create`.

    Return "" if the error is no unknown word, or if this table does not have the word.
    """
    match = _UNKNOWN.match(message)
    if match is None:
        return ""
    kind, word = match.groups()
    command = path.removeprefix("tidelog").strip()
    if kind == "command":
        return "" if command else COMMANDS.get(word, "")
    return OPTIONS.get((command, word)) or OPTIONS.get(("", word), "")
