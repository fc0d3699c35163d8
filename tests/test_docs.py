"""What the pages link to and name is there, for everyone who clones the repository."""

import re
from pathlib import Path

import pytest

from tests.test_house import ROOT, tracked

DESIGN = ROOT / "docs" / "design.md"
PAGES = (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md")
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)")
_CODE = re.compile(r"`([^`\n]+)`")
_FILE = re.compile(r"(?<![\w./*-])[\w.-]+(?:/[\w.-]+)+\.(?:cuh?|json|md|nft|py|sh|toml|ya?ml)\b")
_CLASS = re.compile(r"\b[A-Z][a-z]\w*[a-z][A-Z]\w*|\bKV[A-Z]\w+")
_DEFINED = re.compile(r"^ *class (\w+)|^(\w+)(?:: [^=\n]+)? = ", re.MULTILINE)
FILES = {ROOT / name for name in tracked("")}


@pytest.mark.parametrize("page", sorted(file for file in FILES if file.suffix == ".md"), ids=lambda p: p.name)
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    present = FILES | {parent for file in FILES for parent in file.parents}
    targets = [(page.parent / link).resolve() for link in _LINK.findall(page.read_text())]
    assert [target for target in targets if target not in present] == []


@pytest.mark.parametrize("page", sorted(file for file in FILES if file.suffix == ".md"), ids=lambda p: p.name)
def test_links_lead_to_sections_that_are_there(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]*)#([\w-]+)\)", page.read_text())
    targets = [((page.parent / link).resolve() if link else page, anchor) for link, anchor in links]
    assert [(name, anchor) for name, anchor in targets if name.suffix == ".md" and anchor not in _anchors(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_a_page_names_are_in_the_repository(page: Path) -> None:
    """A test may be named without the folder `tests`."""
    names = {str(file.relative_to(ROOT)) for file in FILES}
    names |= {name.removeprefix("tests/") for name in names}
    named = {name for code in _CODE.findall(page.read_text()) for name in _FILE.findall(code)}
    assert named - names == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`(?:tests/)?([\w/]+\.py)::(\w+)", page.read_text())
    assert [test for file, test in named if f"def {test}(" not in (ROOT / "tests" / file).read_text()] == []


def test_classes_that_the_design_names_are_defined_in_the_product() -> None:
    product = [file for file in FILES if file.suffix == ".py" and not _is_tool(file)]
    defined = {name for file in product for names in _DEFINED.findall(file.read_text()) for name in names}
    named = {name for code in _CODE.findall(DESIGN.read_text()) for name in _CLASS.findall(code)}
    assert len(named) > 50
    assert named - defined == set()


def _anchors(page: Path) -> set[str]:
    """What links can lead to: headings, as GitHub names them, and marks."""
    text = page.read_text()
    headings = re.findall(r"^#+ (.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings} | set(
        re.findall(r'<a id="([\w-]+)">', text)
    )


def _is_tool(file: Path) -> bool:
    return file.relative_to(ROOT).parts[0] in ("tests", "benchmarks", "deploy")
