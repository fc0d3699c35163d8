"""What the pages link to is there, for everyone who clones the repository."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
_LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[\w-]*)?\)")


def tracked_files() -> set[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {ROOT / name for name in listed.split("\0") if name}


@pytest.mark.parametrize("page", sorted(file for file in tracked_files() if file.suffix == ".md"), ids=lambda p: p.name)
def test_links_lead_to_files_of_the_repository(page: Path) -> None:
    files = tracked_files()
    present = files | {parent for file in files for parent in file.parents}
    targets = [(page.parent / link).resolve() for link in _LINK.findall(page.read_text())]
    assert [target for target in targets if target not in present] == []
