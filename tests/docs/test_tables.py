"""The pages say what the code says."""

import re

from tests.docs.tables import COMMANDS, REFERENCE, flags_table, with_tables

README = REFERENCE.parents[1] / "README.md"


def test_the_tables_are_up_to_date() -> None:
    """`python -m tests.docs.tables` rewrites them."""
    text = REFERENCE.read_text()
    assert with_tables(text) == text


def test_every_flag_that_the_readme_mentions_exists() -> None:
    known = set(re.findall(r"`(--[a-z-]+)`", flags_table()))
    for block in re.findall(r"```bash\n(.*?)```", README.read_text(), flags=re.DOTALL):
        for command in re.findall(rf"hisparse-pd (?:{'|'.join(COMMANDS)})\b[^\n]*(?:\\\n[^\n]*)*", block):
            assert set(re.findall(r"(--[a-z-]+)", command)) <= known, command
