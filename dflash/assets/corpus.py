"""Turns the Python standard library into short instructions and answers: the embedded target's world.

Each function or method with a docstring or parameters yields several conversations. Their answers mix free text (the
docstring) with predictable text (the signature as JSON, the parameter list, a call, a test skeleton), as in real use.
"""

import ast
import hashlib
import json
import random
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Directories of the standard library with generated, vendored or non-English text.
SKIPPED = {"site-packages", "lib2to3", "idlelib", "turtledemo", "ensurepip", "__pycache__", "encodings", "pydoc_data"}
HELDOUT_SHARE = 12  # one module in twelve is never trained on
MAX_PARAMETERS = 7


@dataclass(frozen=True)
class Parameter:
    """One parameter of a function; `default` and `annotation` are source text."""

    name: str
    kind: str
    annotation: str | None
    default: str | None


@dataclass(frozen=True)
class Function:
    """A function or method of the standard library, with its signature line and first docstring paragraph."""

    module: str
    name: str
    signature: str
    parameters: tuple[Parameter, ...]
    returns: str | None
    doc: str


@dataclass(frozen=True)
class Example:
    """One instruction with its answer."""

    module: str
    kind: str
    prompt: str
    answer: str

    @property
    def heldout(self) -> bool:
        """Whether the example's module belongs to the held-out split."""
        package = self.module.split(".")[0] if not self.module.startswith("test.") else self.module
        return int(hashlib.sha256(package.encode()).hexdigest(), 16) % HELDOUT_SHARE == 0


def standard_library(root: Path | None = None) -> Iterator[Function]:
    """Every function of the standard library under `root` that has parameters or a docstring, in a fixed order."""
    root = root or Path(sysconfig.get_path("stdlib"))
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if SKIPPED & set(relative.parts) or "bad" in file.name:
            continue
        try:
            tree = ast.parse(file.read_text(encoding="utf-8"))
        except (SyntaxError, UnicodeDecodeError, ValueError):  # test data of the library that is broken on purpose
            continue
        yield from functions(tree, ".".join(relative.with_suffix("").parts))


def functions(tree: ast.AST, module: str) -> Iterator[Function]:
    """The functions and methods in `tree` that are worth asking about."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            parameters = tuple(parameters_of(node.args))
            doc = (ast.get_docstring(node) or "").split("\n\n")[0].strip()
            if 0 < len(parameters) <= MAX_PARAMETERS or (doc and not parameters):
                returns = ast.unparse(node.returns) if node.returns else None
                yield Function(module, node.name, signature_of(node), parameters, returns, doc)


def signature_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The `def` line of `node`, normalised."""
    prefix = "async def" if isinstance(node, ast.AsyncFunctionDef) else "def"
    arrow = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"{prefix} {node.name}({ast.unparse(node.args)}){arrow}:"


def parameters_of(arguments: ast.arguments) -> Iterator[Parameter]:
    """The parameters of a function, without `self` and `cls`."""
    plain = [(a, "positional-only") for a in arguments.posonlyargs] + [(a, "positional") for a in arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(arguments.defaults)) + list(arguments.defaults)
    rows: list[tuple[ast.arg, str, ast.expr | None]] = [(a, k, d) for (a, k), d in zip(plain, defaults)]
    if arguments.vararg:
        rows.append((arguments.vararg, "variadic", None))
    rows += [(a, "keyword-only", d) for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults)]
    if arguments.kwarg:
        rows.append((arguments.kwarg, "variadic keyword", None))
    for argument, kind, default in rows:
        if argument.arg not in ("self", "cls"):
            annotation = ast.unparse(argument.annotation) if argument.annotation else None
            yield Parameter(argument.arg, kind, annotation, ast.unparse(default) if default else None)


def describe_as_json(function: Function) -> str:
    """The signature as indented JSON."""
    rows = [
        {"name": p.name, "kind": p.kind, "required": is_required(p), "default": p.default} for p in function.parameters
    ]
    return json.dumps({"function": function.name, "parameters": rows, "returns": function.returns}, indent=2)


def is_required(parameter: Parameter) -> bool:
    """Whether a caller must give the parameter."""
    return parameter.default is None and not parameter.kind.startswith("variadic")


def list_parameters(function: Function) -> str:
    """One line a parameter."""
    lines = [f"The function `{function.name}` takes the following parameters:", ""]
    for p in function.parameters:
        rest = "required" if is_required(p) else f"optional, the default is `{p.default}`" if p.default else "optional"
        lines.append(f"- `{p.name}` ({p.kind}): {rest}.")
    return "\n".join(lines)


def write_call(function: Function) -> str:
    """A call that names every parameter."""
    given = [p for p in function.parameters if not p.kind.startswith("variadic")]
    lines = [f"    {p.name}={p.default or p.name}," for p in given]
    return "\n".join(["```python", f"result = {function.name}(", *lines, ")", "```"])


def write_test(function: Function) -> str:
    """A unit test skeleton."""
    given = [p for p in function.parameters if not p.kind.startswith("variadic")]
    title = "".join(part.capitalize() for part in function.name.split("_")) or function.name
    lines = ["```python", "import unittest", "", "", f"class Test{title}(unittest.TestCase):"]
    lines += [f"    def test_{function.name.strip('_')}(self):"]
    lines += [f"        {p.name} = {p.default or 'None'}" for p in given]
    lines += [f"        result = {function.name}({', '.join(p.name for p in given)})"]
    lines += ["        self.assertIsNotNone(result)", "", ""]
    lines += ['if __name__ == "__main__":', "    unittest.main()", "```"]
    return "\n".join(lines)


def write_docstring(function: Function) -> str:
    """The docstring's first paragraph as a block."""
    return f'```python\n"""{function.doc}"""\n```'


def document_arguments(function: Function) -> str:
    """The sections that follow a docstring's first paragraph."""
    lines = ["Args:"]
    for p in function.parameters:
        what = f"{p.annotation}, " if p.annotation else ""
        rest = "required" if is_required(p) else f"defaults to {p.default or 'empty'}"
        lines.append(f"    {p.name}: {what}{rest}.")
    return "\n".join([*lines, "", "Returns:", f"    {function.returns or 'The result of ' + function.name}."])


# kind -> (instruction, answer, what the function must have)
KINDS: dict[str, tuple[str, Callable[[Function], str], str]] = {
    "json": ("Describe the signature of this function as JSON.", describe_as_json, "parameters"),
    "parameters": ("List the parameters of this function.", list_parameters, "parameters"),
    "call": ("Write a call of this function that names every parameter.", write_call, "parameters"),
    "test": ("Write a unit test skeleton for this function.", write_test, "parameters"),
    "arguments": ("Document the arguments and the result of this function.", document_arguments, "parameters"),
    "docstring": ("Write the docstring of this function.", write_docstring, "doc"),
}


def examples(seed: int = 0, root: Path | None = None) -> list[Example]:
    """All examples, without duplicates, in a shuffled order that depends on `seed` alone."""
    found: dict[tuple[str, str], Example] = {}
    for function in standard_library(root):
        for kind, (instruction, answer, needs) in KINDS.items():
            if getattr(function, needs):
                prompt = f"{instruction}\n\n```python\n{function.signature}\n```"
                found.setdefault((kind, function.signature), Example(function.module, kind, prompt, answer(function)))
    rows = list(found.values())
    random.Random(seed).shuffle(rows)
    return rows
