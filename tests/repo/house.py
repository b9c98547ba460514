"""The house: what each top-level file imports, how long it is, and whether the rules hold.

    python tests/repo/house.py

Prints the files in layers, each with its lines and its imports, and fails where a rule is broken.
There is no rule about lengths: they are printed and not judged.
"""

import ast
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
ORDER = (  # a file may import those before it
    "cli",
    "files",
    "distributed",
    "verify",
    "config",
    "problems",
    "inputs",
    "policy",
    "rollout",
    "served",
    "replies",
    "bank",
    "skills",
    "eval",
    "runlog",
    "sgsd",
    "baselines",
    "report",
)
COLUMNS = 100


def imported(text: str) -> set[str]:
    """The modules that a source imports anywhere: in functions and for types, too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").split(".")[0])
    return found


def layers_of(graph: dict[str, set[str]]) -> list[list[str]]:
    """The files in layers, each importing only from those before; a cycle ends in the last."""
    layers = []
    left = dict(graph)
    while left:
        layer = [name for name, imports in left.items() if not imports & set(left)]
        layer = layer or list(left)
        layers.append(layer)
        for name in layer:
            del left[name]
    return layers


def faults_of(texts: dict[str, str], graph: dict[str, set[str]]) -> list[str]:
    """Each broken rule as a line. texts: {module: source}; graph: {module: its own imports}."""
    faults = []
    for name, imports in graph.items():
        if name not in ORDER:
            faults.append(f"{name}.py has no place in the order of tests/repo/house.py")
            continue
        above = ORDER[: ORDER.index(name)]
        for other in sorted(imports - set(above)):
            faults.append(f"{name}.py imports {other}, which stands beside or below it")
    for name, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            if len(line) > COLUMNS:
                faults.append(f"{name}.py:{number} has {len(line)} columns, {COLUMNS} are allowed")
            if "# fmt: skip" in line:
                faults.append(f"{name}.py:{number} is kept from the formatter")
    return faults


def check(folder: pathlib.Path = ROOT) -> list[str]:
    """Print the house in `folder`, and return each broken rule as a line."""
    texts = {path.stem: path.read_text() for path in sorted(folder.glob("*.py"))}
    graph = {name: imported(text) & set(texts) for name, text in texts.items()}
    for level, layer in enumerate(layers_of(graph)):
        for name in layer:
            imports = " ".join(sorted(graph[name])) or "-"
            print(f"{level}  {name + '.py':16}{len(texts[name].splitlines()):6} lines  {imports}")
    return faults_of(texts, graph)


if __name__ == "__main__":
    faults = check()
    print("\n".join(faults) or "all rules hold")
    sys.exit(bool(faults))
