"""Rules of the design that a reader cannot see at a glance: what the scripts differ in, and who knows whom."""

import ast
import copy
import re
import subprocess

import pytest
from tiny import ROOT

SCRIPTS = ("baseline.py", "distributed_ddp.py", "distributed_fsdp.py")
COMMON = sorted((ROOT / "common").glob("*.py"))
GOLDEN = ROOT / "tests" / "golden"


def script_diff(first, second):
    """The difference of two scripts as `make golden` writes it."""
    command = ["diff", "-U0", "--label", first, "--label", second, first, second]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout


@pytest.mark.parametrize("first, second, most", [(*SCRIPTS[:2], 60), (*SCRIPTS[1:], 40)])
def test_the_diff_is_the_lesson(first, second, most):
    """The scripts differ in what was looked at and committed; after an intended change: `make golden`."""
    diff = script_diff(first, second)
    name = f"{first.removesuffix('.py')}-{second.removesuffix('.py')}.diff"
    assert diff == (GOLDEN / name).read_text(), f"{first} and {second} differ otherwise than tests/golden/{name} says"
    assert len([line for line in diff.splitlines()[2:] if line[0] in "+-"]) < most


def test_the_scripts_have_the_same_functions():
    names = [[node.name for node in ast.parse((ROOT / s).read_text()).body if hasattr(node, "name")] for s in SCRIPTS]
    assert names[0] == names[1] == names[2] == ["train_step", "train_one_epoch", "main"]


@pytest.mark.parametrize(
    "call, scripts",
    [
        ("DistributedDataParallel(", {"distributed_ddp.py"}),
        ("fully_shard(", {"distributed_fsdp.py"}),
        ("no_sync(", {"distributed_ddp.py"}),
        (".backward(", set(SCRIPTS)),
        ("clip_grad_norm_(", set(SCRIPTS)),
        ("scaler.step(optimizer)", set(SCRIPTS)),
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
    paths = [*COMMON, *(ROOT / "tools").glob("*.py"), *(ROOT / s for s in SCRIPTS)]
    found = {path.name for path in paths if knows(ast.parse(path.read_text()), "torch.distributed")}
    assert found == {"distributed.py", "distributed_ddp.py", "distributed_fsdp.py", "allreduce.py"}
    assert not knows(ast.parse((ROOT / "baseline.py").read_text()), "common.distributed")


FORBIDDEN = [f"common.{name}" for name in ("squad", "features", "model", "runtime", "record", "args", "evaluation")]
COMMAND_LINE = {"metrics": {"main", "read_predictions", "read_na_probs", "_read_object"}}  # these may know of files


@pytest.mark.parametrize("name", ["batches", "answers", "metrics"])
def test_pure_modules_know_no_files_models_or_ranks(name):
    tree = ast.parse((ROOT / "common" / f"{name}.py").read_text())
    for module in ("common.distributed", "torch.distributed", "transformers"):
        assert not knows(tree, module), f"{name}.py knows {module}"
    command_line = COMMAND_LINE.get(name, set())
    assert command_line <= {getattr(node, "name", None) for node in tree.body}
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    assert not {"open", "Path", "pathlib"} & names, f"{name}.py opens files"
    assert not {"open", "read_text", "write_text", "write_bytes"} & attributes, f"{name}.py opens files"
    for node in tree.body:
        if getattr(node, "name", None) in command_line or ast.unparse(node).startswith("if __name__ =="):
            continue
        for module in FORBIDDEN:
            assert not knows(node, module), f"{name}.py, line {node.lineno}: knows {module}"
        used = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        assert not used & command_line, f"{name}.py, line {node.lineno}: {used & command_line} read files"
