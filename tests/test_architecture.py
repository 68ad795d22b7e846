"""The rules of the design that a reader cannot see at a glance, held over the syntax trees of every module."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("probes", "dflash", "repro", "tests")
# a package may import those before it
ALLOWED = {"probes": set(), "dflash": {"probes"}, "repro": {"probes", "dflash"}, "tests": {"probes", "dflash", "repro"}}
COMPILE_HOME = "dflash/attention/"
# places that may name torch's private parts: the table, and the programs that reproduce faults inside torch
PRIVATE_HOMES = ("probes/torch_internals", "repro/bodies/", "repro/schedule", "repro/sync")
# programs run by name, which no module imports: a probe's target may use what the package must not
PROGRAMS = {"probes/case_target.py"}
LONGEST_FILE, LONGEST_FUNCTION = 400, 50


def modules(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def dotted(node: ast.AST) -> str:
    """`a.b.c` of an attribute chain that starts at a name; empty for anything else."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id, *reversed(parts)]) if isinstance(node, ast.Name) else ""


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module, and every `module.name`, that a tree imports, at any depth, also by a literal import_module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and dotted(node.func).endswith("import_module") and node.args:
            argument = node.args[0]
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value


def wrong_imports(tree: ast.AST, package: str) -> list[str]:
    forbidden = set(PACKAGES) - ALLOWED[package] - {package}
    return [name for name in imported(tree) if name.split(".")[0] in forbidden]


def compile_calls(tree: ast.AST) -> list[str]:
    """Uses of torch.compile, called or handed on, under its own or an imported name."""
    used = [dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return [name for name in [*used, *imported(tree)] if name == "torch.compile"]


def private_torch(tree: ast.AST) -> list[str]:
    """Private names reached from torch by import or attribute."""
    used = [dotted(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = [name for name in [*used, *imported(tree)] if name.split(".")[0] == "torch"]
    return sorted({n for n in names if any(p.startswith("_") and not p.startswith("__") for p in n.split("."))})


def import_effects(tree: ast.Module) -> list[str]:
    """Statements of a module that do something when it is imported."""
    quiet = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    return [
        f"line {node.lineno}: {type(node).__name__}"
        for node in tree.body
        if not isinstance(node, quiet) and not _is_quiet(node)
    ]


def _is_quiet(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Constant)  # a docstring
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Name)  # a name of the module's own
    if isinstance(node, ast.If):
        test = ast.unparse(node.test)
        return test in ("TYPE_CHECKING", "__name__ == '__main__'")
    return isinstance(node, ast.TypeAlias) if sys.version_info >= (3, 12) else False


def long_functions(tree: ast.AST) -> list[str]:
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
    return [f.name for f in functions if (f.end_lineno or 0) - f.lineno >= LONGEST_FUNCTION]


def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_run_one_way_from_probes_to_dflash_to_repro_and_tests(package: str) -> None:
    found = {name_of(p): wrong for p in modules(package) if (wrong := wrong_imports(parsed(p), package))}
    assert {name: wrong for name, wrong in found.items() if name not in PROGRAMS} == {}


def test_programs_that_are_excepted_from_the_import_order_are_imported_by_nothing() -> None:
    names = {program.removesuffix(".py").replace("/", ".") for program in PROGRAMS}
    users = {name_of(p) for p in modules("dflash", "probes") if names & set(imported(parsed(p)))}
    assert users == set()


def test_torch_compile_is_used_only_by_the_attention_strategies() -> None:
    users = {name_of(p) for p in modules("dflash") if compile_calls(parsed(p))}
    assert users
    assert {name for name in users if not name.startswith(COMPILE_HOME)} == set()


def test_private_torch_names_are_named_in_one_place() -> None:
    named = {name_of(p): private_torch(parsed(p)) for p in modules("dflash", "probes", "repro")}
    assert {name: found for name, found in named.items() if found and not name.startswith(PRIVATE_HOMES)} == {}


def test_modules_do_nothing_when_imported() -> None:
    assert {name_of(p): e for p in modules("dflash", "probes") if (e := import_effects(parsed(p)))} == {}


def test_files_and_functions_stay_short() -> None:
    paths = modules("dflash", "probes", "repro")
    assert {name_of(p) for p in paths if len(p.read_text(encoding="utf-8").splitlines()) >= LONGEST_FILE} == set()
    assert {name_of(p): long for p in paths if (long := long_functions(parsed(p)))} == {}


# imported inside functions, by those who installed them
EXTRAS = ("matplotlib", "tensorboard", "wandb")
IMPORT_ALL = """
import importlib, sys, threading, torch
from probes.torch_internals import differences, not_at_rest, snapshot
def load(name):
    module, _, attribute = name.rpartition(".")
    try:
        importlib.import_module(name)
    except ImportError:  # a name inside a module
        getattr(importlib.import_module(module), attribute, None)
split = sys.argv.index("--")
for name in sys.argv[1:split]:  # what libraries do when loaded is not ours
    load(name)
before, threads = snapshot(), threading.active_count()
for name in sys.argv[split + 1:]:
    importlib.import_module(name)
found = [str(d) for d in differences(before, snapshot())] + [str(d) for d in not_at_rest(snapshot())]
assert not found, found
assert not torch.cuda.is_initialized()
assert threading.active_count() == threads
"""


def test_importing_every_module_leaves_torch_and_the_threads_as_they_were() -> None:
    paths = [p for p in modules("dflash", "probes") if name_of(p) not in PROGRAMS and p.stem != "__main__"]
    own = [name_of(p).removesuffix(".py").removesuffix("/__init__").replace("/", ".") for p in paths]
    absent = {name for name in EXTRAS if find_spec(name) is None}
    named = {name for p in paths for name in imported(parsed(p)) if name.split(".")[0] not in PACKAGES}
    outside = {name for name in named if not absent & set(name.split("."))}
    arguments = [*sorted(outside), "--", *own]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr


OFFENDER = """
import torch, tests.parts
from torch import compile
from torch._dynamo import config
from repro import schedule
torch.compile(len)
torch._C._cuda_init()
torch.set_default_dtype(torch.float64)
importlib.import_module("torch._inductor")
"""


def test_the_checks_find_each_offence_in_a_module_that_commits_them_all() -> None:
    tree = ast.parse(OFFENDER)
    assert wrong_imports(tree, "dflash") == ["tests.parts", "repro.schedule"]
    assert len(compile_calls(tree)) == 2
    found = private_torch(tree)
    assert {"torch._C._cuda_init", "torch._dynamo.config", "torch._inductor"} <= set(found)
    assert [e.split(": ")[1] for e in import_effects(tree)] == ["Expr"] * 4
    body = "\n".join("    pass" for _ in range(60))
    assert long_functions(ast.parse(f"def f():\n{body}")) == ["f"]
