"""The modules of the product, each with the first line of its docstring.

`python -m tests.repo.modules [FOLDER...]`, for example `storage/wal`.
"""

import ast
import sys

from tests.repo.test_house_rules import MODULES, PRODUCT, ROOT


def main(folders: list[str]) -> None:
    for path in MODULES:
        if any(path.is_relative_to(folder) for folder in folders or PRODUCT):
            docstring = ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8"))) or ""
            print(f"{path.as_posix():48} {docstring.splitlines()[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
