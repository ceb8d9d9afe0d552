"""Words that the command line does not have: values of switches, and words of other tools."""

import re

import pytest

from tests.repo.test_packaging import commands_of
from tests.system.test_cli_messages import Command, tidelog
from tidelog.service.cli import main as cli
from tidelog.service.cli.hints import COMMANDS, OPTIONS

__all__ = ["tidelog"]

PATHS = {" ".join(words): options for words, options in commands_of(cli.loaded())}
GLOBAL = {name for parameter in cli.loaded().params for name in parameter.opts}


def switches() -> list[tuple[str, str, str]]:
    """Return each switch of each command, with the switch that says the contrary or ""."""
    rows = []

    def walk(command: object, path: str) -> None:
        for name, subcommand in sorted(getattr(command, "commands", {}).items()):
            walk(subcommand, f"{path} {name}".strip())
        if not hasattr(command, "commands"):
            for parameter in command.params:  # type: ignore[attr-defined]
                if getattr(parameter, "is_flag", False) and "--help" not in parameter.opts:
                    contrary = "".join(parameter.secondary_opts[:1])
                    rows.append((path, parameter.opts[0], contrary))

    walk(cli.loaded(), "")
    return rows


def test_a_switch_with_a_value_says_how_to_write_it(tidelog: Command) -> None:
    all_switches = switches()
    assert len({path for path, _, _ in all_switches}) > 30
    for path, switch, contrary in all_switches:
        form = f"{switch} or {contrary}" if contrary else switch
        line = f"{switch} takes no value: give {form} without 'true'"
        result = tidelog(*path.split(), switch, "true")
        assert result == (2, "", f"{line} (an argument 'true' goes before the options)")
        assert tidelog(*path.split(), f"{switch}=true") == (2, "", line)


@pytest.mark.parametrize("word", ["TRUE", "no", "0", "1"])
@pytest.mark.parametrize("store", [["a"], ["--store", "a"], []])
def test_a_value_of_a_switch_is_not_the_store(
    tidelog: Command, store: list[str], word: str
) -> None:
    result = tidelog("serve", *store, "--port", "0", "--auto-create-topics", word)
    assert result.status == 2
    assert result.line.startswith(
        "--auto-create-topics takes no value: give --auto-create-topics or "
        f"--no-auto-create-topics without {word!r}"
    )


@pytest.mark.parametrize("words", ["--json -- true", "true --json", "--json 1", "--json --", "t"])
def test_arguments_after_switches_that_are_no_values_are_taken(
    tidelog: Command, words: str
) -> None:
    result = tidelog("topics", "describe", *words.split(), server="http://127.0.0.1:9")
    assert "takes no value" not in result.line
    assert result.status == (2 if words == "--json --" else 3)


def test_each_word_of_another_tool_has_its_hint(tidelog: Command) -> None:
    for word, hint in COMMANDS.items():
        assert tidelog(word) == (2, "", f"No such command {word!r}: {hint}")
        assert tidelog(word, "more").line == f"No such command {word!r}: {hint}"
    for (path, option), hint in OPTIONS.items():
        for command in [path] if path else ["topics list", "consume", "groups reset"]:
            result = tidelog(*command.split(), option, "x")
            assert result == (2, "", f"No such option: {option}: {hint}"), (command, option)


def test_what_a_hint_names_exists() -> None:
    hints = [("", hint) for hint in COMMANDS.values()]
    hints += [(path, hint) for (path, _), hint in OPTIONS.items()]
    names = [(path, name) for path, hint in hints for name in re.findall("`([^`]+)`", hint)]
    assert len(names) > 50
    for path, name in names:
        program, *words = name.split()
        if program != "tidelog":  # an option of the command
            assert program in PATHS.get(path, PATHS["consume"]), (path, name)
        elif words[0].startswith("--"):
            assert words[0] in GLOBAL | {"--help"}, name
        else:
            assert " ".join(words) in PATHS or any(
                command_path.startswith(" ".join(words) + " ") for command_path in PATHS
            ), name


def test_other_unknown_words_name_the_help(tidelog: Command) -> None:
    assert tidelog("nothing") == (2, "", "No such command 'nothing' (see `tidelog --help`)")
    result = tidelog("topics", "list", "--nothing")
    assert result.line.startswith("No such option: --nothing")
    assert result.line.endswith("(see `tidelog topics list --help`)")
