"""Rules of the design that a reader cannot see at a glance: what the scripts differ in, and who knows whom."""

import ast
import copy
import re
import subprocess

import pytest
from tiny import ROOT

from common.args import build_parser, classes

SCRIPTS = ("baseline.py", "distributed_ddp.py", "distributed_fsdp.py")
COMMON = sorted((ROOT / "common").rglob("*.py"))
GOLDEN = ROOT / "tests" / "golden"
FLOORS = ("errors", "start", "args", "data", "model", "scoring", "run")  # of common/, from the ground


def script_diff(first, second):
    """The difference of two scripts as `make golden` writes it."""
    command = ["diff", "-U0", "--label", first, "--label", second, first, second]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.parametrize("first, second, most", [(*SCRIPTS[:2], 35), (*SCRIPTS[1:], 40)])
def test_the_diff_is_the_lesson(first, second, most):
    """The scripts differ in what was looked at and committed; after an intended change: `make golden`."""
    diff = script_diff(first, second)
    name = f"{first.removesuffix('.py')}-{second.removesuffix('.py')}.diff"
    assert diff == (GOLDEN / name).read_text(), f"{first} and {second} differ otherwise than tests/golden/{name} says"
    assert len([line for line in diff.splitlines()[2:] if line[0] in "+-"]) <= most


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_is_a_page(script):
    lines = (ROOT / script).read_text().splitlines()
    assert len(lines) <= 100 and max(map(len, lines)) <= 100
    functions = [node for node in ast.parse("\n".join(lines)).body if isinstance(node, ast.FunctionDef)]
    assert [function.name for function in functions] == ["train_step", "main"]
    assert [length(function) <= most for function, most in zip(functions, (20, 55), strict=True)] == [True, True]


def length(node):
    return node.end_lineno - node.lineno + 1


def parameters(function):
    names = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
    return len(names) - bool(names and names[0].arg in ("self", "cls"))


# Triton's kernels and what starts them, autograd's own signature, and what transformers calls.
EXEMPT = {
    "kernels.py": None,
    "layer.py": {"forward"},
    "embeddings.py": {"forward"},
    "attention.py": {"packed_attention"},
}


@pytest.mark.parametrize("path", [*COMMON, *sorted((ROOT / "tools" / "report").glob("*.py"))], ids=str)
def test_small_functions_and_classes(path):
    exempt = EXEMPT.get(path.name, set())
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef) and exempt is not None and node.name not in exempt:
            assert length(node) <= 60, f"{path.name}: {node.name} has {length(node)} lines"
            assert parameters(node) <= 7, f"{path.name}: {node.name} has {parameters(node)} parameters"
        if isinstance(node, ast.ClassDef):
            most = 200 if node.name == "Run" and path.name == "run.py" else 150  # Run puts the parts together
            assert length(node) <= most, f"{path.name}: {node.name} has {length(node)} lines"


@pytest.mark.parametrize(
    "call, scripts",
    [
        ("DistributedDataParallel(", {"distributed_ddp.py"}),
        ("fully_shard(", {"distributed_fsdp.py"}),
        ("require_backward_grad_sync", {"distributed_ddp.py"}),
        ("set_requires_gradient_sync", {"distributed_fsdp.py"}),
        ("LambdaLR(", set(SCRIPTS)),
        ("data.steps(", set(SCRIPTS)),
        (".backward(", set(SCRIPTS)),
        ("clip_grad_norm_(", set(SCRIPTS)),
        ("scaler.step(optimizer)", set(SCRIPTS)),
        ("optimizer.step(", set()),
    ],
)
def test_what_matters_stands_in_the_scripts(call, scripts):
    assert {name for name in SCRIPTS if call in (ROOT / name).read_text()} == scripts
    for path in COMMON:
        assert call not in code(ast.parse(path.read_text())), f"{call} is hidden in {path.name}"


def code(tree):
    """A parsed file as text without comments and docstrings."""
    tree = copy.deepcopy(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            node.value.value = ""
    return ast.unparse(tree)


def imports(tree):
    """Names of all modules that a parsed file or a part of it imports, wherever in it."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def test_common_imports_no_script_and_no_tool():
    for path in COMMON:
        own = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
        assert not own & {"tools", "benchmarks", *(name.removesuffix(".py") for name in SCRIPTS)}, path.name


def floor(module):
    """The floor of a module of common/, "common.data.plan"; None for common itself."""
    room = module.split(".")[1:2]
    return FLOORS.index(room[0]) if room and room[0] in FLOORS else None


def too_high(path, text):
    """What a module of common/ imports from a higher floor."""
    own = floor(".".join(path.relative_to(ROOT).with_suffix("").parts))
    found = {name for name in imports(ast.parse(text)) if name.startswith("common.")}
    return sorted(name for name in found if own is not None and (floor(name) or 0) > own)


def test_imports_go_down_the_floors():
    for path in COMMON:
        assert not too_high(path, path.read_text()), path.relative_to(ROOT)
    named = {path.relative_to(ROOT / "common").parts[0].removesuffix(".py") for path in COMMON}
    assert named == {*FLOORS, "metrics", "__init__"}  # metrics: the command alone
    assert too_high(ROOT / "common" / "data" / "plan.py", "def f():\n    from common.run.world import World")


def test_nothing_imports_what_a_command_or_a_later_floor_is_for():
    """common.metrics is the command; the scores are in scoring."""
    for path in [*COMMON, *(ROOT / "tools").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert not {name for name in imports(ast.parse(path.read_text())) if name.startswith("common.metrics")}, path


def knows(tree, module):
    """Whether a parsed file, or a part of it, imports this module or one within it, or names it in its code."""
    imported = any(f"{name}.".startswith(f"{module}.") for name in imports(tree))
    return imported or re.search(rf"\b{re.escape(module)}\b", code(tree)) is not None


@pytest.mark.parametrize(
    "text",
    [
        "import torch.distributed",
        "import torch.distributed.fsdp as fsdp",
        "from torch import distributed as dist",
        "def f():\n    from torch.distributed.fsdp import fully_shard",
        "import torch\nrank = torch.distributed.get_rank()",
        "importlib.import_module('torch.distributed')",
    ],
)
def test_knowing_torch_distributed_is_noticed(text):
    assert knows(ast.parse(text), "torch.distributed")


def test_prose_and_other_names_are_not_knowledge():
    text = '"""As torch.distributed does."""\nimport torch.distributions  # torch.distributed\n'
    assert not knows(ast.parse(text), "torch.distributed")


def test_torch_distributed_is_known_to_few():
    paths = [*COMMON, *(ROOT / "tools").rglob("*.py"), *(ROOT / s for s in SCRIPTS)]
    found = {path.name for path in paths if knows(ast.parse(path.read_text()), "torch.distributed")}
    assert found == {"distributed.py", "distributed_ddp.py", "distributed_fsdp.py", "allreduce.py"}
    assert not knows(ast.parse((ROOT / "baseline.py").read_text()), "common.run.distributed")


FORBIDDEN = ["common.args", "common.model", "common.run", *(f"common.data.{n}" for n in ("files", "squad", "cache"))]


@pytest.mark.parametrize("name", ["data/plan", "data/packing", "scoring/answers", "scoring/metrics"])
def test_pure_modules_know_no_files_models_or_ranks(name):
    tree = ast.parse((ROOT / "common" / f"{name}.py").read_text())
    for module in (*FORBIDDEN, "torch.distributed", "transformers"):
        assert not knows(tree, module), f"{name}.py knows {module}"
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {"open", "Path", "pathlib"} & names, f"{name}.py opens files"
    assert not {"open", "read_text", "write_text", "write_bytes"} & attributes, f"{name}.py opens files"


def test_every_argument_has_a_class():
    parser = build_parser("")
    assert all(hasattr(action, "kind") for action in parser._actions if action.dest != "help")
    kinds = {"experiment", "input", "placement", "output", "bookkeeping", "mode"}
    assert set(classes().values()) == kinds and set(classes()) >= {"epochs", "model_path", "run_name"}


ROW = r"\| ([^|]+) \| `baseline\.py` lines? ([\d, –]+) \| `([^`]+)` \|"
GUIDE = re.findall(ROW, (ROOT / "CONTRIBUTING.md").read_text())


@pytest.mark.parametrize("question, lines, text", GUIDE, ids=[question for question, *_ in GUIDE])
def test_the_reading_guide_names_the_right_lines(question, lines, text):
    """The quoted code stands on the first line that is named."""
    numbers = [int(number) for number in re.findall(r"\d+", lines)]
    script = (ROOT / "baseline.py").read_text().splitlines()
    assert text in script[numbers[0] - 1] and numbers == sorted(numbers) and numbers[-1] <= len(script)


def test_the_reading_guide_answers_each_question():
    assert len(GUIDE) >= 7
