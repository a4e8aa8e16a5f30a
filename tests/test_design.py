"""Rules of the design that a reader cannot see at a glance: what the scripts differ in, and who knows whom."""

import ast
import difflib
import re

import pytest
from tiny import ROOT

SCRIPTS = ("baseline.py", "distributed_ddp.py", "distributed_fsdp.py")
COMMON = sorted((ROOT / "common").glob("*.py"))
GOLDEN = ROOT / "tests" / "golden"


def script_diff(first, second):
    """The difference of two scripts as `diff -U0` prints it."""
    texts = [(ROOT / name).read_text().splitlines(keepends=True) for name in (first, second)]
    return "".join(difflib.unified_diff(*texts, first, second, n=0))


@pytest.mark.parametrize("first, second, most", [(*SCRIPTS[:2], 60), (*SCRIPTS[1:], 40)])
def test_the_diff_is_the_lesson(first, second, most):
    """The scripts differ in what was looked at and committed; after an intended change: `make golden`."""
    diff = script_diff(first, second)
    name = f"{first.removesuffix('.py')}-{second.removesuffix('.py')}.diff"
    assert diff == (GOLDEN / name).read_text(), f"{first} and {second} differ otherwise than tests/golden/{name} says"
    assert len([line for line in diff.splitlines()[2:] if line[0] in "+-"]) < most


def test_the_scripts_have_the_same_functions():
    names = [[node.name for node in ast.parse((ROOT / s).read_text()).body if hasattr(node, "name")] for s in SCRIPTS]
    assert names[0] == names[1] == names[2] == ["train_one_epoch", "main"]


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
        code = re.sub(r'""".*?"""', "", path.read_text(), flags=re.S)
        assert call not in code, f"{call} is hidden in {path.name}"


def imports(path):
    """Names of all modules that a file imports, wherever in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def test_common_imports_no_script_and_no_tool():
    for path in COMMON:
        own = {name.split(".")[0] for name in imports(path)}
        assert not own & {"tools", "benchmarks", *(name.removesuffix(".py") for name in SCRIPTS)}, path.name


def test_torch_distributed_is_known_to_few():
    allowed = {"distributed.py", "distributed_ddp.py", "distributed_fsdp.py", "allreduce.py"}
    for path in [*COMMON, *(ROOT / "tools").glob("*.py"), *(ROOT / s for s in SCRIPTS)]:
        if any(name.startswith("torch.distributed") for name in imports(path)):
            assert path.name in allowed, f"{path.name} imports torch.distributed"
    assert "common.distributed" not in imports(ROOT / "baseline.py")


@pytest.mark.parametrize("name", ["batches", "answers", "metrics"])
def test_pure_modules_know_no_files_models_or_ranks(name):
    tree = ast.parse((ROOT / "common" / f"{name}.py").read_text())
    known = {
        node.module
        for node in tree.body  # at the top: a main() for the command line may read files
        if isinstance(node, ast.ImportFrom)
    }
    assert not known & {f"common.{other}" for other in ("squad", "features", "model", "runtime", "record", "args")}
    assert not {"common.distributed", "torch.distributed", "transformers"} & imports(ROOT / "common" / f"{name}.py")
