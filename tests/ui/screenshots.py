"""Pictures of every page of a running console, for people to look at.

    python -m tests.ui.screenshots http://127.0.0.1:8082 FOLDER [--topic NAME] [--group NAME]

In both themes, and as a phone shows them; says what went wrong in the browser meanwhile. Where the
broker's security is on, TIDELOG_KEY has the key to log in with.
"""

import argparse
import os
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import sync_playwright

from tests.ui.conftest import CHROMIUM, FLAGS, Console

SIZES = {"light": (1280, 800), "dark": (1280, 800), "phone": (390, 844)}


def main() -> int:
    asked = argparse.ArgumentParser()
    asked.add_argument("server")
    asked.add_argument("folder", type=Path)
    asked.add_argument("--topic", default="flights")
    asked.add_argument("--group", default="enrich")
    options = asked.parse_args()
    topic, group = quote(options.topic, safe=""), quote(options.group, safe="")
    places = {
        "overview": "overview",
        "topics": "topics",
        "picture": f"topics/{topic}",
        "records": f"topics/{topic}/records",
        "configs": f"topics/{topic}/configs",
        "groups": "groups",
        "group": f"groups/{group}",
        "metadata": "metadata",
        "api": "api",
        "access-keys": "access/keys",
        "access-acls": "access/acls",
        "access-quotas": "access/quotas",
    }
    key = os.environ.get("TIDELOG_KEY")
    options.folder.mkdir(parents=True, exist_ok=True)
    wrong: list[str] = []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as scratch:
        for size, (width, height) in SIZES.items():
            context = playwright.chromium.launch_persistent_context(
                f"{scratch}/{size}",
                executable_path=CHROMIUM,
                args=list(FLAGS),
                color_scheme="dark" if size == "dark" else "light",
                viewport={"width": width, "height": height},
            )
            console = Console(context.new_page(), options.server.rstrip("/"))
            if key is not None:
                console.page.goto(f"{console.base_url}/ui/")
                console.page.get_by_label("Key", exact=True).fill(key)
                console.page.screenshot(path=options.folder / f"{size}-login.png")
                console.page.get_by_role("button", name="Log in").click()
                console.page.get_by_role("navigation", name="Pages").wait_for()
                console.allow_status(401)
            for name, place in places.items():
                page = console.open(place)
                page.wait_for_timeout(500)
                if name == "records":
                    page.locator("tr.opens").first.click()
                page.screenshot(
                    path=options.folder / f"{size}-{name}.png", full_page=size != "dark"
                )
            wrong += console.wrong
            context.close()
    print("\n".join(wrong) or f"{len(SIZES) * len(places)} pictures, nothing went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
