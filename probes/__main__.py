"""`python -m probes`: the probes there are, one line each. Imports none of them, nor torch."""

import ast
from pathlib import Path


def index() -> dict[str, str]:
    """Every module of this package that runs as a program, with the first line of its docstring."""
    found = {}
    for file in sorted(Path(__file__).parent.glob("*.py")):
        text = file.read_text(encoding="utf-8")
        if file.stem != "__main__" and "\nif __name__ ==" in text:
            found[file.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main() -> None:
    """Prints the index."""
    print("usage: python -m probes.NAME [OPTIONS]; --help of each says more\n")
    for name, line in index().items():
        print(f"  {name:<15} {line}")


if __name__ == "__main__":
    main()
