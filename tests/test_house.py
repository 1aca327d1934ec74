"""The house: rooms import downward, every outside world has one door, nothing grows without notice.

Reads the sources; runs none of them. The lists here are the rules: a change that needs one of them
changed says so in its commit.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "nvoffload"

# A room imports only rooms that stand before it.
# fmt: off
LINE = [
    "errors", "config", "interrupts", "layout", "ledger",
    "native", "buffers", "io", "io.ring", "io.bridge", "io.portable", "io.engine", "io.sim",
    "swapfile", "manifest", "store",
    "shims", "device", "peers", "collectives",
    "partition", "parameter", "sums", "gradient", "unit", "schedule",
    "tiles", "mover", "commit", "backend", "update", "residency", "local", "order", "values", "reduction",
    "landing", "stats", "session", "runtime", "plan", "opening", "optim", "offload",
    "__init__", "demo_model", "demo_report", "demo", "bench", "__main__",
]
# fmt: on
# Without torch, so that the storage half can be used and tested alone.
STORAGE_HALF = LINE[: LINE.index("shims")]
TORCHLESS_ABOVE = {"schedule", "tiles", "mover", "commit", "backend", "update", "residency", "stats"}

# Where an outside world may be named: import or attribute, and the rooms that may.
DOORS = {
    "nvoffload._native": {"native"},
    "aiofiles": {"io.portable"},
    # The demo is a user's program: it chooses the device. The probe says what is there.
    "torch.cuda": {"device", "demo", "__main__"},
    "ctypes": {"device"},
    "torch.distributed": {"peers", "shims"},
    "fcntl": {"swapfile", "io.portable"},
}
# What the design needs against its own rules: a pattern, the kind of file, the one file that has it.
EXCEPTIONS = {
    "the at-fork handler": (r"\bpthread_atfork\(", "c", "native/fork.c"),
    "torch's global optimizer hook": (r"\bregister_optimizer_step_pre_hook\(", "py", "nvoffload/optim.py"),
    "the exit hook": (r"\bweakref\.finalize\(|\batexit\b", "py", "nvoffload/offload.py"),
    "an Optimizer subclass": (r"^class \w+\(.*\bOptimizer\)", "py", "nvoffload/optim.py"),
    "the swap of a module's class": (r"\.__class__\s*=[^=]", "py", "nvoffload/offload.py"),
    "hooks on modules": (r"\.register_(module_)?(full_)?(forward|backward)\w*_hook\(", "py", "nvoffload/runtime.py"),
}
# Inheritance is for exceptions, protocols, value types and nn.Module; these are the rest.
SUBCLASSES = {"AdamW", "LazyState", "SimDevice", "OffloadedParameter", "OffloadedGradient"}

MODULE_LINES_MAX = 400
C_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
# Ratchets: what is longer today, and how long. Entries may only shrink and go.
LONG_MODULES: dict[str, int] = {}
LONG_FUNCTIONS: dict[str, int] = {}

PRIVATE_FOLDER = "".join(["..", "/", "shared"])


def rooms() -> dict[str, Path]:
    """Return every module by its dotted name within the package; a folder's `__init__` is the folder."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1]) if len(parts) > 1 and parts[-1] == "__init__" else ".".join(parts)
        found[name] = path
    return found


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted name of everything imported anywhere in `tree`, lazily too, or by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("importlib.import_module", "__import__"):
            assert isinstance(node.args[0], ast.Constant), f"line {node.lineno}: imports what nobody can read"
            yield str(node.args[0].value)


def named(tree: ast.AST) -> Iterator[str]:
    """Yield what is imported, and every dotted name that is used."""
    yield from imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def room_of(name: str) -> str | None:
    """Return the room that an imported name belongs to, None for a foreign one."""
    if name == "nvoffload":
        return "__init__"
    if not name.startswith("nvoffload."):
        return None
    parts = name.split(".")[1:]
    for length in range(len(parts), 0, -1):
        if ".".join(parts[:length]) in LINE:
            return ".".join(parts[:length])
    return None if parts == ["_native"] else "__init__"


def is_within(name: str, door: str) -> bool:
    return name == door or name.startswith(f"{door}.")


def functions(path: Path) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yield every function of a module with its qualified name."""

    def walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{prefix}{child.name}", child
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{prefix}{child.name}."
            yield from walk(child, inner)

    yield from walk(tree_of(path), "")


def code_length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return lines from `def` to the end, the docstring not counted."""
    num_lines = (function.end_lineno or function.lineno) - function.lineno + 1
    if ast.get_docstring(function) is not None:
        text = function.body[0]
        num_lines -= (text.end_lineno or text.lineno) - text.lineno + 1
    return num_lines


def tracked_texts() -> Iterator[Path]:
    """Yield the project's own text files."""
    for pattern in ("*.md", "*.toml", "*.py", "Makefile", ".ci/*", "docs/*.md", "benchmarks/*", "native/*", "tests/*"):
        yield from (path for path in ROOT.glob(pattern) if path.is_file() and path.suffix not in (".so", ".pyc"))
    yield from rooms().values()


def test_every_room_has_a_place_in_the_line():
    strangers = sorted(set(rooms()) - set(LINE))
    assert not strangers, f"give {strangers} a place in LINE, before its users and after what it uses"


@pytest.mark.parametrize("room", rooms())
def test_rooms_import_only_earlier_rooms(room):
    place = LINE.index(room)
    used = {room_of(name) for name in imported(tree_of(rooms()[room]))} - {None}
    upward = sorted(other for other in used if LINE.index(other) >= place)
    assert not upward, f"{room} imports {upward}, which stand at or after it"


def test_storage_half_imports_no_torch():
    for room, path in rooms().items():
        if room in STORAGE_HALF or room in TORCHLESS_ABOVE:
            torch_names = [name for name in imported(tree_of(path)) if is_within(name, "torch")]
            assert not torch_names, f"{room} imports {torch_names}"


@pytest.mark.parametrize("door", DOORS)
def test_each_outside_world_has_its_door(door):
    users = {room for room, path in rooms().items() if any(is_within(name, door) for name in named(tree_of(path)))}
    assert users <= DOORS[door], f"{door} is named in {sorted(users - DOORS[door])}"


@pytest.mark.parametrize("what", EXCEPTIONS)
def test_each_exception_stands_in_its_one_file(what):
    pattern, kind, home = EXCEPTIONS[what]
    paths = (ROOT / "native").glob("*.[ch]") if kind == "c" else rooms().values()
    found = {str(p.relative_to(ROOT)) for p in paths if re.search(pattern, p.read_text(), re.MULTILINE)}
    assert found == {home}


def test_nothing_else_inherits():
    allowed = {"Protocol", "NamedTuple", "Enum", "IntEnum", "nn.Module", "RuntimeError", "ValueError", "OSError"}
    errors = {n.name for n in tree_of(PACKAGE / "errors.py").body if isinstance(n, ast.ClassDef)}
    for room, path in rooms().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef) and node.name not in SUBCLASSES:
                bases = {ast.unparse(base) for base in node.bases} - allowed - errors
                assert not bases, f"{room}.{node.name} inherits from {sorted(bases)}"


def test_modules_stay_short():
    for room, path in rooms().items():
        num_lines = len(path.read_text().splitlines())
        limit = LONG_MODULES.get(room, MODULE_LINES_MAX)
        assert num_lines <= limit, f"{room} has {num_lines} lines, its limit is {limit}"
    for path in (ROOT / "native").glob("*.[ch]"):
        num_lines = len(path.read_text().splitlines())
        assert num_lines <= C_LINES_MAX, f"{path.name} has {num_lines} lines, its limit is {C_LINES_MAX}"


def test_functions_stay_short():
    for room, path in rooms().items():
        for name, function in functions(path):
            limit = LONG_FUNCTIONS.get(f"{room}.{name}", FUNCTION_LINES_MAX)
            assert code_length(function) <= limit, f"{room}.{name} has {code_length(function)} lines, limit {limit}"


def test_ratchets_are_tight():
    """Goal: an exception that is no longer needed goes. Method: what is listed must exceed the plain limit."""
    lengths = {
        f"{room}.{name}": code_length(function) for room, path in rooms().items() for name, function in functions(path)
    }
    for name, limit in LONG_FUNCTIONS.items():
        assert FUNCTION_LINES_MAX < lengths.get(name, 0) == limit, f"{name}: write {lengths.get(name, 0)} or delete it"
    for room, limit in LONG_MODULES.items():
        num_lines = len(rooms()[room].read_text().splitlines())
        assert MODULE_LINES_MAX < num_lines == limit, f"{room}: write {num_lines} or delete the entry"


def test_public_things_have_docstrings():
    for room, path in rooms().items():
        tree = tree_of(path)
        assert ast.get_docstring(tree), f"{room} has no docstring"
        for node in ast.walk(tree):
            for child in ast.iter_child_nodes(node) if isinstance(node, ast.Module | ast.ClassDef) else ():
                is_definition = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
                if is_definition and not child.name.startswith("_"):
                    assert ast.get_docstring(child), f"{room}: {child.name} (line {child.lineno}) has no docstring"


def test_no_room_swallows_errors():
    for room, path in rooms().items():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
                caught = {ast.unparse(kind) if kind else "everything" for kind in kinds}
                raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
                is_broad = bool(caught & {"everything", "Exception", "BaseException"})
                assert raises or not is_broad, f"{room} line {node.lineno} catches {sorted(caught)} and goes on"


def test_tests_are_claims():
    """Goal: no test is skipped silently. Method: names, docstrings of modules, reasons of skips."""
    for path in (ROOT / "tests").glob("test_*.py"):
        assert ast.get_docstring(tree_of(path)), f"{path.name} has no docstring"
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and re.fullmatch(
                r"pytest\.(mark\.)?(skip|skipif|xfail)", ast.unparse(node.func)
            ):
                words = [
                    a
                    for a in (*node.args, *(k.value for k in node.keywords))
                    if isinstance(a, ast.Constant | ast.JoinedStr)
                ]
                assert words, f"{path.name} line {node.lineno}: a skip says why"
        bare = re.findall(r"@pytest\.mark\.(?:skip|xfail)\s*$", path.read_text(), re.MULTILINE)
        assert not bare, f"{path.name}: a skip says why"


def test_no_claim_goes_unrun():
    """Goal: a test that pytest does not collect is found. Method: a plain function is called or is a test."""
    words = re.findall(r"\w+", "\n".join(path.read_text() for path in (ROOT / "tests").glob("*.py")))
    for path in (ROOT / "tests").glob("*.py"):
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith(("test_", "pytest_")):
                is_used = words.count(node.name) > 1 or bool(node.decorator_list)
                assert is_used, f"{path.name}: {node.name} is neither a test nor used"


def test_nothing_points_outside_of_the_project():
    for path in tracked_texts():
        assert PRIVATE_FOLDER not in path.read_text(), f"{path} points to a folder that readers don't have"
