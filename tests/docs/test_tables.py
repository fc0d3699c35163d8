"""The pages say what the code says."""

import re

from tests.docs.tables import COMMANDS, REFERENCE, flags_table, metrics_table, with_tables

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


def test_the_metrics_of_the_contract_exist() -> None:
    table = metrics_table()
    for name in (
        "host_slots",
        "device_slots",
        "requests",
        "swap_in_hits_total",
        "swap_in_misses_total",
        "swap_in_bytes_total",
        "transfer_bytes_total",
        "transfer_descriptors_total",
        "transfer_seconds",
        "transfer_failures_total",
        "prefill_retries_total",
        "ttft_seconds",
        "inter_token_seconds",
        "decode_batch_size",
    ):
        assert f"`hisparse_pd_{name}`" in table
