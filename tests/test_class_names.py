"""One word, one meaning: a public class name stands for one thing in all packages of the product."""

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (
    "base",
    "transfer",
    "control",
    "kernels",
    "kvcache",
    "hisparse",
    "model",
    "engine",
    "ranks",
    "service",
    "gateway",
    "prefill_node",
    "decode_node",
    "cli",
)


def test_no_public_class_name_is_used_for_two_things() -> None:
    defined = defaultdict(list)
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    defined[node.name].append(str(path.relative_to(ROOT)))
    assert len(defined) > 100
    assert {name: paths for name, paths in defined.items() if len(paths) > 1} == {}
