"""How large the house is: files, imports, lines and words of one or more trees, side by side.

    python research/house/measure.py OLD_TREE .

OLD_TREE is a clone at an earlier commit. An import counts once for each pair of files, wherever it
stands; the command in skills.py's `main` may import a program and does not count.
"""

import argparse
import ast
import pathlib


def imported(tree: ast.AST, names: set[str]) -> set[str]:
    """The files of `names` that a source imports anywhere but in a function `main`."""
    hits = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "main":
            continue
        if isinstance(node, ast.Import):
            hits |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            hits.add(node.module.split(".")[0])
        hits |= imported(node, names)
    return hits & names


def lines_of(paths) -> int:
    return sum(path.read_text(encoding="utf-8").count("\n") for path in paths)


def words_of(paths) -> int:
    return sum(len(path.read_text(encoding="utf-8").split()) for path in paths)


def deepest(graph: dict[str, set[str]]) -> int:
    """The number of floors: the longest chain of imports."""
    floors: dict[str, int] = {}
    left = dict(graph)
    while left:
        ready = [name for name in left if all(other in floors for other in left[name])]
        for name in ready:
            floors[name] = 1 + max((floors[other] for other in left.pop(name)), default=0)
    return max(floors.values())


def measure(root: pathlib.Path) -> dict[str, int]:
    """The counts of one tree."""
    files = sorted(root.glob("*.py"))
    names = {path.stem for path in files}
    graph = {}
    for path in files:
        graph[path.stem] = imported(ast.parse(path.read_text()), names) - {path.stem}
    scripts = [*root.glob("experiments/*.py"), *root.glob("research/**/*.py")]
    pages = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("tiny/**/*.md")]
    results = [*root.glob("results/*.md"), *root.glob("research/**/*.md")]
    return {
        "files at the root": len(files),
        "imports among them": sum(map(len, graph.values())),
        "floors": deepest(graph),
        "lines at the root": lines_of(files),
        "lines of extras": lines_of(root.glob("extras/*.py")),
        "lines of tests": lines_of(root.glob("tests/**/*.py")),
        "lines of scripts": lines_of(scripts),
        "words of README": words_of([root / "README.md"]),
        "words of README, docs and tiny": words_of(pages),
        "words of results": words_of(results),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trees", nargs="+", type=pathlib.Path)
    trees = parser.parse_args().trees
    columns = [measure(tree) for tree in trees]
    print(f"| | {' | '.join(tree.resolve().name for tree in trees)} |")
    print("|---" * (1 + len(trees)) + "|")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(f'{column[name]:,}' for column in columns)} |")


if __name__ == "__main__":
    main()
