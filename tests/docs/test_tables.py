"""The pages say what the code says."""

import re
from pathlib import Path

import pytest

from tests.docs.tables import COMMANDS, README, REFERENCE, flags_table, with_tables


@pytest.mark.parametrize("page", [REFERENCE, README], ids=lambda page: page.name)
def test_the_tables_are_up_to_date(page: Path) -> None:
    """`python -m tests.docs.tables` rewrites them."""
    assert with_tables(page) == page.read_text()


def test_every_flag_that_the_readme_mentions_exists() -> None:
    known = set(re.findall(r"`(--[a-z-]+)`", flags_table()))
    for block in re.findall(r"```bash\n(.*?)```", README.read_text(), flags=re.DOTALL):
        for command in re.findall(rf"hisparse-pd (?:{'|'.join(COMMANDS)})\b[^\n]*(?:\\\n[^\n]*)*", block):
            assert set(re.findall(r"(--[a-z-]+)", command)) <= known, command
