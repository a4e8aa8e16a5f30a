"""Every command in the documentation works, every link leads somewhere, every quoted message is in the source.

A command is run as it stands where that takes seconds. One that needs SQuAD, BERT's weights, GPUs or a cluster is
resolved with --dry-run, in a folder where small files have the names that it asks for, or by its own parser. How each
is checked stands in the test's name: `python -m pytest tests/docs/test_docs.py --collect-only -q` lists them.
"""

import ast
import functools
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys

import fuzz
import pytest
from tiny import ROOT, SAMPLE, SMALL

from tools import ask, fetch, sweep
from tools.report import __main__ as report

PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/*.md"),
        ROOT / "data" / "README.md",
        *ROOT.glob("benchmarks/*.md"),
    ]
)
SCRIPTS = {"run_baseline.sh": "baseline", "run_distributed.sh": "distributed_ddp"}


def text(page):
    return (ROOT / page).read_text(encoding="utf-8")


# ---------------------------------------------------------------------------------------------------------------------
# Commands


def commands(page):
    """The command lines of a page's code blocks, continued lines joined, comments and prompts cut off."""
    blocks = re.findall(r"^```\n(.*?)^```", text(page), flags=re.S | re.M)
    blocks += re.findall(r"^(?: {4}\S.*\n)+", text(page), flags=re.M)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    starts = re.compile(r"(make|python|torchrun|sbatch|srun|bash|source|diff|squeue|pip|cd|git)\s|\.ci/|\.venv/")
    found = [shlex.split(line, comments=True) for line in lines if starts.match(line)]
    for words in found:
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        yield words


def how(words):
    """The name of the check for a command."""
    if words[0] == "make":
        return "make"
    if words[0] in ("source", "squeue", "diff") or words[0].startswith(".ci/"):
        return "shell"
    if any(
        word in SCRIPTS or word in ("baseline.py", *map("distributed_{}.py".format, ("ddp", "fsdp"))) for word in words
    ):
        return "dry_run"
    if words[:2] == ["pip", "install"]:
        return "pip"
    if words[:2] == ["python", "-m"] and words[2].startswith("benchmarks."):
        return "benchmarks"
    if words[:2] == ["python", "-m"]:
        return words[2].replace(".", "_")
    return "generator" if words[0] == "python" else "unknown"


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """A folder that looks like the project after `make fetch` and a few runs: small files under the wanted names."""
    folder = tmp_path_factory.mktemp("project")
    for path in ROOT.iterdir():
        if path.name not in ("data", "runs", "report", ".git") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    (folder / "data" / "squad").mkdir(parents=True)
    for name in ("sample", "sample-v2"):
        (folder / "data" / name).symlink_to(ROOT / "data" / name)
    for version in ("1.1", "2.0"):
        for part in ("train", "dev"):
            shutil.copy(SAMPLE / f"{part}.json", folder / "data" / "squad" / f"{part}-v{version}.json")
    shutil.copy(SAMPLE / "train.json", folder / "my.json")
    for name in ("google-bert/bert-base-cased", "MINILM_FOLDER"):
        (folder / name).mkdir(parents=True)
        (folder / name / "config.json").write_text(json.dumps({"model_type": "bert", **SMALL}))
    articles = json.loads((SAMPLE / "dev.json").read_text())["data"]
    questions = [qa["id"] for article in articles for part in article["paragraphs"] for qa in part["qas"]]
    (folder / "predictions.json").write_text(json.dumps(dict.fromkeys(questions, "an answer")))
    for path in (ROOT / "benchmarks" / "records" / "sample").glob("*.json"):
        (folder / "runs" / path.stem).mkdir(parents=True)
        shutil.copy(path, folder / "runs" / path.stem / "run.json")
    return folder


def check_make(words, **_):
    done = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and words[1] in re.findall(r"^([a-z]+):", text("Makefile"), flags=re.M), done.stderr


def check_shell(words, **_):
    if words[0] == "diff":  # runs, and finds differences
        assert subprocess.run(words, cwd=ROOT, capture_output=True).returncode == 1
    elif words[0].startswith(".ci/"):
        assert (ROOT / words[0]).is_file()
    else:
        assert words in (["source", ".venv/bin/activate"], ["squeue", "--me"])


def check_dry_run(words, monkeypatch, capsys, **_):
    at = next(i for i, word in enumerate(words) if word.endswith((".py", ".sh")))
    script, arguments = words[at], words[at + 1 :]
    assert (ROOT / script).is_file()
    module = SCRIPTS.get(script, script.removesuffix(".py"))
    if script == "run_distributed.sh" and arguments and not arguments[0].startswith("-"):
        module = f"distributed_{arguments.pop(0)}"
    if words[0] == "sbatch":
        assert all(re.match(r"--[a-z-]+=", word) for word in words[1:at])
    monkeypatch.setattr(sys, "argv", [f"{module}.py", *arguments, "--dry-run"])
    with pytest.raises(SystemExit) as end:
        importlib.import_module(module).main()
    assert end.value.code == 0 and "arguments:" in capsys.readouterr().out


def check_tools_sweep(words, monkeypatch, capsys, **_):
    monkeypatch.setattr(sys, "argv", [word for word in words[2:] if word not in ("--submit", "--local")])
    sweep.main()
    assert "sbatch --job-name=" in capsys.readouterr().out


def check_tools_report(words, monkeypatch, capsys, tmp_path, **_):
    monkeypatch.setattr(sys, "argv", [*words[2:], "--out", str(tmp_path)])
    report.main()
    assert "report:" in capsys.readouterr().out and (tmp_path / "report.html").is_file()


def check_tools_fetch(words, tmp_path, **_):
    for target in words[3:]:
        assert fetch.plan(target, tmp_path)


def check_tools_ask(words, **_):
    ask.build_parser().parse_args(words[3 : words.index("<") if "<" in words else None])


def check_tests_fuzz(words, **_):
    fuzz.build_parser().parse_args(words[3:])


def check_common_metrics(words, project, **_):
    done = subprocess.run([sys.executable, *words[1:]], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0 and "f1" in done.stdout, done.stderr


def check_benchmarks(words, **_):
    module = importlib.import_module(words[2])
    if hasattr(module, "build_parser"):
        own = module.build_parser.__module__ == words[2]  # benchmarks.quality takes the scripts' options
        module.build_parser(*([] if own else [""])).parse_args(words[3:])
    else:
        assert len(words) == 3


def check_pip(words, **_):
    assert words[2] == "-r" and (ROOT / words[3]).is_file()


def check_generator(words, **_):
    assert (ROOT / words[1]).is_file()  # run by tests/data/test_sample_data.py


COMMANDS = list(dict.fromkeys((page, tuple(words)) for page in PAGES for words in commands(page)))


@pytest.mark.parametrize("page, words", COMMANDS, ids=[f"{p}: {shlex.join(w)} [{how(w)}]" for p, w in COMMANDS])
def test_command(page, words, project, monkeypatch, capsys, tmp_path):
    check = globals().get(f"check_{how(list(words))}")
    assert check, f"{page}: no check here for: {shlex.join(words)}"
    monkeypatch.chdir(project)
    monkeypatch.setenv("SQUAD_DIR", str(project / "data" / "squad"))
    check(list(words), project=project, monkeypatch=monkeypatch, capsys=capsys, tmp_path=tmp_path)


def test_commands_are_found():
    assert len([1 for page, _ in COMMANDS if page == "README.md"]) >= 18
    assert {how(list(words)) for _, words in COMMANDS} >= {
        "make",
        "dry_run",
        "tools_sweep",
        "tools_report",
        "tools_ask",
    }


def test_a_dry_run_writes_nothing_and_finds_what_is_missing(tmp_path):
    run = [sys.executable, str(ROOT / "baseline.py"), "--dry-run", "--epochs", "7"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and "  epochs: 7\n" in done.stdout and not list(tmp_path.iterdir())
    done = subprocess.run(
        [*run, "--train-file", "none.json", "--dev-fraction", "0.1"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.startswith("error: none.json: no such file") and not done.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Names and links


@functools.cache
def tracked():
    """The text of the project's Python and shell files."""
    files = [path for end in ("py", "sh") for path in ROOT.glob(f"**/*.{end}") if "/." not in str(path)]
    return {path: path.read_text(encoding="utf-8") for path in files}


# Options of other programs: sbatch, squeue, torchrun, pip, pytest.
OTHERS = {"account", "partition", "gpus", "ntasks-per-node", "exclude", "exclusive", "me", "standalone", "index-url"}
OTHERS |= {"nodes", "gpus-per-node", "nproc-per-node", "no-deps", "collect-only", "help"}


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    """Files, make targets, modules and options that a page names."""
    code = re.findall(r"`([^`\n]+)`", text(page)) + re.findall(r"^```\n(.*?)^```", text(page), flags=re.S | re.M)
    python = "\n".join(source for path, source in tracked().items() if path.suffix == ".py")
    shell = "\n".join(source for path, source in tracked().items() if path.suffix == ".sh")
    for part in code:
        for target in re.findall(r"(?<![\w.])make ([a-z]+)", part):
            assert re.search(rf"^{target}:", text("Makefile"), flags=re.M), target
        for package, module in re.findall(r"python -m (common|tools|benchmarks)\.([a-z]+)", part):
            assert any((ROOT / package / f"{module}{end}.py").is_file() for end in ("", "/__main__")), part
        for option in re.findall(r"(?<![\w-])--([a-z0-9][a-z0-9-]*)", part):
            ours = f'"--{option}"' in python or f'"--{option.removeprefix("no-")}"' in python or f"--{option}" in shell
            assert ours or option in OTHERS, option
        if re.fullmatch(r"(common|data|docs|slurm|benchmarks|tests|tools)/[\w./-]*", part):
            assert (ROOT / part).exists() or part.startswith(("data/squad", "data/models")), part


def test_the_readmes_tree_is_the_tree():
    block = next(b for b in re.findall(r"^```\n(.*?)^```", text("README.md"), flags=re.S | re.M) if "common/\n" in b)
    named = set(re.findall(r"\b(\w+\.py)\b", block))
    there = {path.name for path in [*ROOT.glob("*.py"), *ROOT.glob("common/*.py")]} - {"__init__.py"}
    assert named == there
    for room in [path for path in ROOT.glob("common/**/") if (path / "__init__.py").exists() and path.name != "common"]:
        assert f"{room.name}/ " in block, room
    for tool in [*ROOT.glob("tools/*.py"), *(path.parent for path in ROOT.glob("tools/*/__main__.py"))]:
        assert tool.stem in block or tool.stem == "__init__", tool


def anchor(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", text(page)):
        if target.startswith("http"):
            continue
        file, _, place = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        if place:
            assert place in [anchor(line) for line in re.findall(r"^#+ (.*)$", path.read_text(), flags=re.M)], target


# ---------------------------------------------------------------------------------------------------------------------
# Messages


@functools.cache
def templates():
    """What the project may print: each string of the Python source, and each quoted one of the shell scripts.

    What is put in when it is printed is … here.
    """
    found = []
    for path, source in tracked().items():
        if "tests" in path.parts:
            continue
        if path.suffix == ".sh":
            found += [re.sub(r"\$\{[^}]*\}|\$\w+", "…", part) for part in re.findall(r'"([^"\n]*)"', source)]
            continue
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.JoinedStr):
                found.append("".join(part.value if isinstance(part, ast.Constant) else "…" for part in node.values))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.append(re.sub(r"\{[^}]*\}", "…", node.value))
    return found


def quoted_messages():
    """[(message, fragments)] of the first column of docs/troubleshooting.md's tables, where that begins with code."""
    cells = re.findall(r"^\| `([^`]+)`", text("docs/troubleshooting.md"), flags=re.M)
    return [(cell, [part.strip(" ;") for part in cell.split("…") if part.strip(" ;:")]) for cell in cells]


NOT_PRINTED = {  # by Python, by Slurm; keys of the record
    "ModuleNotFoundError: No module named 'torch'",
    "sbatch: error: Invalid generic resource (gres) specification",
    *("share_of_peak", "other_processes"),
}


def test_there_are_thirty_causes():
    lines = re.findall(r"^\| (?!---|message|what shows)", text("docs/troubleshooting.md"), flags=re.M)
    assert len(lines) >= 30


@pytest.mark.parametrize("message, fragments", quoted_messages(), ids=[message for message, _ in quoted_messages()])
def test_a_quoted_message_is_printed(message, fragments):
    if message.split("` ")[0] in NOT_PRINTED:
        return
    pattern = ".*".join(map(re.escape, fragments))
    assert any(re.search(pattern, template, flags=re.S) for template in templates()), message
