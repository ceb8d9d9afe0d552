"""The texts of the tree keep to the vocabulary rule (`tests/repo/vocabulary.py`)."""

from pathlib import Path

import pytest

from tests.repo.test_house_rules import TREE
from tests.repo.vocabulary import ALLOWED, ROOT, faults, texts, violations

# Joined here, so that this file passes the rule.
FORBIDDEN = [
    ("Nobody", "reads", "it"),
    ("it", "waits", "for", "\n", "ever"),
    ("the", "broker", "is", "told"),
    ("a", "client,", "who", "reads"),
    ("And", "if", "the", "broker", "stops?"),
    ("What", "was", "read", "counts."),
    ("It", "ends.", "Who", "reads", "it", "fails."),
    ("-", "a", "\n-", "What", "is", "left."),
]
PLAIN = [
    ("The", "broker", "reads", "what", "the", "client", "wrote."),
    ("What", "is", "a", "segment?"),
    ("|", "What", "|", "Where", "|"),
    ("it", "is", "foretold"),
]


@pytest.mark.parametrize("words", FORBIDDEN, ids=" ".join)
def test_forbidden_text_is_found_once(words: tuple[str, ...]) -> None:
    assert len(list(faults(" ".join(words).replace("\n ", "\n").replace(" \n", "\n")))) == 1


@pytest.mark.parametrize("words", PLAIN, ids=" ".join)
def test_plain_text_passes(words: tuple[str, ...]) -> None:
    assert not list(faults(" ".join(words)))


def test_comments_docstrings_and_messages_are_texts(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text('"""Doc string."""\n\nx = 1  # one\n# two\n# three\ny = f"a {x} b", "name"\n')
    assert sorted(texts(module)) == [
        (1, "Doc string."),
        (3, "one\ntwo\nthree"),
        (6, " b"),
        (6, "a "),
    ]


def test_texts_of_the_tree_keep_to_the_vocabulary() -> None:
    all_violations = violations(TREE)
    assert not all_violations, "\n".join(f"{v.path}:{v.line}: {v.text}" for v in all_violations)


def test_each_allowed_text_is_in_its_file() -> None:
    for path, text in ALLOWED:
        assert text in {file_text for _, file_text in texts(ROOT / path)}
