"""The generated pages are as `make docs` writes them: the API, settings, commands, metrics."""

import dataclasses

from deploy import generate
from tidelog.service.settings.settings import Settings


async def test_every_generated_page_is_as_the_code_says() -> None:
    stale = [
        page.name
        for page, text in (await generate.pages()).items()
        if not page.exists() or page.read_text(encoding="utf-8") != text
    ]
    assert not stale, f"run `make docs`: {', '.join(stale)} differ"


async def test_the_pages_are_not_empty() -> None:
    pages = await generate.pages()
    assert pages[generate.API_PAGE].count("\n| `") > 70
    assert pages[generate.CLI_PAGE].count("\n## tidelog ") > 10
    assert pages[generate.METRICS_PAGE].count("\n| `tidelog_") > 70
    assert pages[generate.SETTINGS_PAGE].count("\n| `") >= len(dataclasses.fields(Settings))


def test_the_list_of_commands_says_what_each_one_needs() -> None:
    page = generate.cli_page()
    for row in (
        "| `tidelog topics create` | a broker |",
        "| `tidelog maintain` | the store |",
        "| `tidelog dev` | the store |",
        "| `tidelog compact` | a broker or the store |",
    ):
        assert page.count(row) == 1
    assert page.count("\n| `tidelog ") == page.count("\nUsage: `tidelog ")
