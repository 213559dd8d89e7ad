"""The house's rules, held by reading the source: who imports whom, how large things are, what importing costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dplab

PACKAGE = Path(dplab.__file__).parent
ROOT = PACKAGE.parent
FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES}

PURE = {"errors", "specs"}
MAY_IMPORT = {
    "errors": set(),
    "specs": {"errors"},
    "layout": PURE,
    "resources": {"errors"},
    "quantities": {"errors"},
    "cards": {"errors", "resources"},
    "topology": PURE | {"layout", "cards", "quantities"},
    "telemetry": PURE | {"layout"},
    "planner": PURE | {"layout", "telemetry", "resources", "cards", "quantities", "topology"},
    "wire": PURE | {"layout", "telemetry", "topology"},
    "core": PURE | {"layout", "wire", "telemetry"},
    "checkpoint": PURE | {"layout", "wire", "telemetry", "core"},
    "engine": PURE | {"layout", "wire", "telemetry", "core", "checkpoint", "topology"},
    "workloads": PURE | {"layout", "wire", "telemetry", "core", "engine", ""},
    "peers": PURE | {"layout", "wire", "telemetry", "core", "engine", "workloads", ""},
    "launcher": PURE | {"topology", "telemetry", "views", "diagnosis", "widgets", ""},
    "diagnosis": PURE | {"layout", "telemetry"},
    "views": PURE | {"layout", "telemetry", "planner", "cards", "diagnosis"},
    "widgets": PURE | {"views", "launcher", "telemetry", "planner", "cards", ""},
    "commands": PURE | {"telemetry", "planner", "views", "launcher", "resources", "cards", "topology",
                        "workloads.catalog", "workloads.corpora", "workloads.races", "workloads.drill", "peers.catalog",
                        "wire.world", "commands", ""},
    "cli": PURE | {"commands", ""},
    "__main__": {"cli"},
    "": PURE | {"checkpoint", "engine", "launcher", "planner", "telemetry", "topology", "wire", "workloads"},
}
"""Parts by what they may import besides themselves; `""` is the package's own lazy names."""
ALSO = {"planner.calibrate": {""}}
"""What single modules may import besides: calibration launches ranks, by the public name."""

NO_TORCH = ("errors", "specs", "layout", "resources", "quantities", "cards", "topology", "telemetry", "planner",
            "views", "diagnosis", "widgets", "commands", "cli", "workloads.catalog", "workloads.corpora",
            "peers.catalog", "checkpoint.manifest", "launcher.launch", "launcher.run")


def imports(path: Path, *, top_only: bool = False) -> set[str]:
    """Absolute names of the modules that a file imports, those for type checking left out."""
    tree = ast.parse(path.read_text())
    skipped: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            skipped.update(inner for child in node.body for inner in ast.walk(child))
        if top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            skipped.update(ast.walk(node))
    found: set[str] = set()
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = MODULES[path].split(".")
                parents = parents[: len(parents) - node.level + (path.name == "__init__.py")]
                base = ".".join([*parents, *([base] if base else [])])
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= names
            if base != "dplab" or not all(map(is_module, names)):      # else the package gives modules, no names
                found.add(base)
    return {name for name in found if name.split(".")[0] != "dplab" or is_module(name)}


def is_module(name: str) -> bool:
    path = ROOT / Path(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def inside(module: str) -> str:
    """A module's name below the package."""
    return module.removeprefix("dplab").removeprefix(".")


@pytest.mark.parametrize("path", FILES, ids=lambda path: MODULES[path])
def test_imports_follow_the_house(path):
    part = inside(MODULES[path]).split(".")[0]
    assert part in MAY_IMPORT, f"{MODULES[path]} belongs to no part; give it one in MAY_IMPORT"
    for name in imports(path):
        if name.split(".")[0] != "dplab":
            continue
        target = inside(name)
        if target.split(".")[0] == part and part:
            continue
        allowed = MAY_IMPORT[part] | ALSO.get(inside(MODULES[path]), set())
        assert target in allowed or target.split(".")[0] in allowed or any(
            target and name.startswith(f"{target}.") for name in allowed), f"{MODULES[path]} imports {name}"


def test_modules_import_each_other_in_no_circle():
    graph = {MODULES[path]: {name for name in imports(path, top_only=True) if name in MODULES.values()}
             for path in FILES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail[trail.index(module):], module))
        if module in done:
            return
        for name in graph[module] - {module, "dplab"}:
            visit(name, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("path", FILES, ids=lambda path: MODULES[path])
def test_files_are_short_enough_to_read(path):
    assert len(path.read_text().splitlines()) <= 350


@pytest.mark.parametrize("path", FILES, ids=lambda path: MODULES[path])
def test_functions_are_short_and_take_few_parameters(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        assert lines <= 50, f"{node.name} has {lines} lines"
        arguments = node.args
        positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args) if a.arg not in ("self", "cls")]
        counted = len(positional) + (len(arguments.kwonlyargs) if node.name.startswith("_") else 0)
        assert node.name == "__init__" or counted <= 7, f"{node.name} takes {counted} parameters"
        assert len(positional) <= 7, f"{node.name} takes {len(positional)} positional parameters"


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_dplab_imports_no_torch_and_no_numpy():
    assert python("import sys, dplab; print([m for m in ('torch', 'numpy', 'plotly', 'IPython') if m in sys.modules])"
                  ).strip() == "[]"


def test_light_modules_import_no_torch():
    modules = [module for module in MODULES.values()
               if inside(module).startswith(NO_TORCH) and not module.endswith("__main__")]
    assert len(modules) > 20
    code = (f"import importlib, sys\nfor name in {modules!r}:\n    importlib.import_module(name)\n"
            f"    assert 'torch' not in sys.modules, name")
    python(code)


def test_help_and_estimate_import_no_torch():
    code = ("import sys; from dplab.cli import main\n"
            "for arguments in (['--help'], ['estimate', '--params', '1e9', '--world-size', '8']):\n"
            "    try: main(arguments)\n    except SystemExit: pass\n"
            "assert 'torch' not in sys.modules")
    python(code)


def test_every_public_name_resolves():
    assert set(dir(dplab)) == set(dplab.__all__)
    for name in dplab.__all__:
        assert getattr(dplab, name) is not None
    with pytest.raises(AttributeError, match=r"module 'dplab' has no attribute 'paralelize'; it has .*parallelize"):
        _ = dplab.paralelize


def test_only_the_wire_calls_collectives():
    """Collectives of torch.distributed are named, counted and timed in one place; peers are other people's engines."""
    collectives = {"all_reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor",
                   "broadcast", "all_to_all", "all_to_all_single", "isend", "irecv", "send", "recv", "barrier"}
    for path in FILES:
        if inside(MODULES[path]).split(".")[0] in ("wire", "peers"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "dist":
                assert node.attr not in collectives, f"{MODULES[path]}:{node.lineno} calls dist.{node.attr}"


def test_type_checkers_see_every_public_name():
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    seen = {f"{node.module}.{alias.name}" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)
            for alias in node.names if alias.asname == alias.name}
    assert seen == {f"dplab.{home}.{name}" for name, home in dplab._HOME.items()}
