"""What the code must not grow into again: sizes, and shapes that were removed from it."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOT_THE_PRODUCT = ("tests", "benchmarks", "deploy", "docs", "examples")
SOURCES = (".py", ".cu", ".cuh")
NODES = ("prefill_node", "decode_node")
# A limit is what was reached, rounded up. Lower it with every change that makes room. Only a feature raises it,
# or the test of a bug that was found.
LIMITS = {
    "lines of the product": 44338,
    "files of the product": 294,
    "lines of tests": 51165,
}
BANNED: dict[str, tuple[str, tuple[str, ...]]] = {
    # A pattern of a line, and the packages that it must not be in; with `-`, those that it may be in; with none, all.
    "a group that may be missing": (r"\bRankGroup \| None\b", ()),
    "a branch for nodes of one rank": (r"ranks is (not )?None\b", NODES),
    "a branch for a KV format": (r"\bisinstance\(.*\bFp8Format\b", ("-kvcache",)),
    "state beside its owner": (r"\bWeakKeyDictionary\b", ("prefill_node",)),
    "pickle": (r"^\s*(import|from) c?[pP]ickle\b", ()),
}
TRANSPORTS = {"tcp", "shm", "rdma"}


@cache
def tracked(*suffixes: str) -> tuple[Path, ...]:
    """Files of the repository that exist, relative to it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = (Path(name) for name in listed.split("\0") if name.endswith(suffixes))
    return tuple(name for name in names if (ROOT / name).exists())


def product(*suffixes: str) -> list[Path]:
    return [path for path in tracked(*suffixes) if path.parts[0] not in NOT_THE_PRODUCT]


def lines_of(path: Path) -> list[str]:
    return (ROOT / path).read_text().splitlines()


def count(what: str) -> int:
    paths = (
        [path for path in tracked(*SOURCES, ".h") if path.parts[0] == "tests"] if "tests" in what else product(*SOURCES)
    )
    return len(paths) if what.startswith("files") else sum(len(lines_of(path)) for path in paths)


@pytest.mark.parametrize("what", LIMITS)
def test_the_code_stays_small(what: str) -> None:
    assert count(what) <= LIMITS[what]


@pytest.mark.parametrize("what", BANNED)
def test_what_was_removed_does_not_come_back(what: str) -> None:
    pattern, packages = BANNED[what]
    allowed = {package[1:] for package in packages if package.startswith("-")}
    wanted = set(packages) - {f"-{package}" for package in allowed}
    found = [
        f"{path}:{number}"
        for path in product(".py")
        if path.parts[0] not in allowed and (not wanted or path.parts[0] in wanted)
        for number, line in enumerate(lines_of(path), 1)
        if re.search(pattern, line)
    ]
    assert found == []


def strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Strings of a module, but for those that are types: in `Literal`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("Literal"):
            continue
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node
        yield from strings(node)


def test_transfer_alone_knows_transports_by_name() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path in product(".py")
        if path.parts[0] != "transfer"
        for node in strings(ast.parse((ROOT / path).read_text()))
        if node.value in TRANSPORTS
    ]
    assert found == []
