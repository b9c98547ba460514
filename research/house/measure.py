"""How large the house is: files, imports, lines and words of one or more trees, side by side.

    python research/house/measure.py OLD_TREE .

OLD_TREE is a clone at an earlier commit. An import counts once for each pair of files of the root
and of lib/, wherever it stands.
"""

import argparse
import ast
import pathlib
from collections.abc import Iterable, Sequence


def imported(tree: ast.AST, names: set[str]) -> set[str]:
    """The modules of `names`, such as "sgsd" or "lib.config", that a source imports."""
    mentioned = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            mentioned |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            mentioned.add(node.module)
            mentioned |= {f"{node.module}.{alias.name}" for alias in node.names}
    return mentioned & names


def lines_of(paths: Iterable[pathlib.Path]) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def words_of(paths: Iterable[pathlib.Path]) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def lines_of_errors(path: pathlib.Path) -> int:
    """Lines that build the message of an error: `raise` with a text, and what its names hold."""
    lines: set[int] = set()
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(function, ast.FunctionDef):
            continue
        raised = [node for node in ast.walk(function) if isinstance(node, ast.Raise)]
        texts = [node for node in raised if any(map(is_text, ast.walk(node)))]
        names = {x.id for node in texts for x in ast.walk(node) if isinstance(x, ast.Name)}
        parts = [
            node for node in ast.walk(function) if isinstance(node, ast.Assign | ast.AugAssign)
        ]
        for node in parts:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            held = {x.id for target in targets for x in ast.walk(target) if isinstance(x, ast.Name)}
            if held & names and any(map(is_text, ast.walk(node.value))):
                texts.append(node)
        for node in texts:
            lines |= {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}
    return len(lines)


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
    )


def deepest(graph: dict[str, set[str]]) -> int:
    """The number of floors: the longest chain of imports; 0 where imports form a circle."""
    floors: dict[str, int] = {}
    left = dict(graph)
    while left:
        ready = [name for name in left if all(other in floors for other in left[name])]
        if not ready:
            return 0
        for name in ready:
            floors[name] = 1 + max((floors[other] for other in left.pop(name)), default=0)
    return max(floors.values())


def measure(root: pathlib.Path) -> dict[str, int]:
    """The counts of one tree."""
    top, lib = sorted(root.glob("*.py")), sorted(root.glob("lib/*.py"))
    modules = {path.stem: path for path in top}
    modules |= {f"lib.{path.stem}": path for path in lib}
    graph = {}
    for name, path in modules.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        graph[name] = imported(tree, {*modules}) - {name}
    scripts = [*root.glob("experiments/*.py"), *root.glob("research/**/*.py")]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("tiny/**/*.md")]
    results = [*root.glob("results/*.md"), *root.glob("research/**/*.md")]
    programs = [*top, *lib, *root.glob("methods/*.py"), *root.glob("extras/*.py")]
    return {
        "files at the root": len(top),
        "files of lib": len(lib),
        "imports among both": sum(map(len, graph.values())),
        "floors (0: a circle)": deepest(graph),
        "lines at the root": lines_of(top),
        "lines of lib": lines_of(lib),
        "lines of methods": lines_of(root.glob("methods/*.py")),
        "lines of extras": lines_of(root.glob("extras/*.py")),
        "lines that build errors": sum(map(lines_of_errors, programs)),
        "lines of tests": lines_of(root.glob("tests/**/*.py")),
        "lines of scripts": lines_of(scripts),
        "words of README": words_of([root / "README.md"]),
        "words of README, docs and tiny": words_of(pages),
        "words of results": words_of(results),
    }


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("trees", nargs="+", type=pathlib.Path)
    trees = parser.parse_args(argv).trees
    columns = [measure(tree) for tree in trees]
    print(f"| | {' | '.join(tree.resolve().name for tree in trees)} |")
    print("|---" * (1 + len(trees)) + "|")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(f'{column[name]:,}' for column in columns)} |")


if __name__ == "__main__":
    main()
