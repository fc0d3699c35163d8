"""One word, one meaning: a public name of a class, an alias or a Literal stands for one thing in the whole product."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator

from tests.test_house import ROOT, product

EXCEPTIONS = {
    # Words of the APIs that the gateway speaks, each in the module of its API or of its half (request or answer).
    *("Block", "Choice", "Message", "Prompt", "PromptLogprobs", "Status", "Tool", "ToolChoice"),
    "Json",  # read-only in answers, built in the schema of the HTTP interface
}
"""Names that still stand for two things. Each is used within one package or module; the list only shrinks."""


def types_of(module: ast.Module) -> Iterator[str]:
    """Names of classes, and of types that have a name of their own at the module's level."""
    for node in ast.walk(module):
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
    for node in module.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if isinstance(getattr(node, "value", None), ast.Call):
            continue  # a TypeVar, or an object
        yield from (name.id for name in targets if isinstance(name, ast.Name) and re.match(r"[A-Z]+[a-z]", name.id))


def test_no_public_name_of_a_type_is_used_for_two_things() -> None:
    defined = defaultdict(list)
    for path in product(".py"):
        for name in types_of(ast.parse((ROOT / path).read_text())):
            defined[name].append(str(path))
    assert len(defined) > 100
    twice = {name: paths for name, paths in defined.items() if len(paths) > 1}
    assert {name: paths for name, paths in twice.items() if name not in EXCEPTIONS} == {}
