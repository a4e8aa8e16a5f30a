"""A new user's walk: the README's commands from a fresh copy to a report, on a real Slurm of two virtual nodes.

What `make install` and `make fetch` would bring is put there instead: this Python, and small files under the names of
SQuAD and BERT-base. The cluster's GPUs exist in its books only, so the jobs get --device cpu, as the README says.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import pytest
import slurm_cluster
from tiny import ROOT, SAMPLE, minilm_tokenizer, save_network


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """The project's files alone, with a small data/squad and data/models/bert-base-uncased."""
    folder = tmp_path_factory.mktemp("clone")
    files = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    for name in filter(None, files):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    for part, articles in (("train", 4), ("dev", 2)):
        tree = json.loads((SAMPLE / f"{part}.json").read_text())
        (folder / "data" / "squad").mkdir(exist_ok=True)
        small = json.dumps(tree | {"data": tree["data"][:articles]})
        (folder / "data" / "squad" / f"{part}-v1.1.json").write_text(small)
    model = folder / "data" / "models" / "bert-base-uncased"
    save_network(model)
    minilm_tokenizer().save_pretrained(model)
    return folder


def block(start):
    """The command lines of the README's code block with a line that starts so."""
    blocks = re.findall(r"^```\n(.*?)^```", (ROOT / "README.md").read_text(), flags=re.S | re.M)
    lines = next(b.splitlines() for b in blocks if any(line.startswith(start) for line in b.splitlines()))
    return [shlex.split(line, comments=True) for line in lines]


def test_from_a_clone_to_a_report(clone):
    slurm_cluster.require()
    jobs = []
    with slurm_cluster.running_cluster() as cluster:
        cluster.environment |= {"VENV": sys.prefix, "OMP_NUM_THREADS": "1"}
        cluster.environment.pop("SQUAD_DIR", None)
        for words in block("sbatch run_baseline.sh"):
            if words[0] == "sbatch":
                jobs.append(cluster.submit(*words[1:], "--device", "cpu", cwd=clone))
            elif words[0] == "squeue":
                assert len(cluster.call(*words, cwd=clone).splitlines()) == 1 + len(jobs)
                for job in jobs:
                    assert job.wait(seconds=180) == "COMPLETED", job.log()
                log = jobs[0].log()
            elif words == ["make", "report"]:
                (clone / ".venv").symlink_to(sys.prefix)
                said = cluster.call("make", "--old-file=.venv/installed", "report", cwd=clone)
            else:
                assert words[0] == "make"
    assert len(jobs) == 2
    assert re.search(r"baseline × 1 +1 ", said) and re.search(r"ddp × 4 on 2 nodes +1 ", said)
    assert f"data: SQuAD v1.1: {clone}/data/squad/train-v1.1.json" in log and "model: bert-base-uncased" in log
    page = (clone / "report" / "report.html").read_text()
    assert "ddp × 4 on 2 nodes" in page and "Speed-up at the same global batch" in page

    # And the questions after it, with the name of a run.
    (clone / "notes.txt").write_text("The ferry was built in 1932 by Marta Kowal.\n")
    (question,) = block("python -m tools.ask")
    words = [sys.executable, *question[1:]]
    words = [word.replace("NAME", str(jobs[0].number)) for word in words]
    environment = {name: value for name, value in os.environ.items() if name != "SQUAD_DIR"}
    done = subprocess.run(words, cwd=clone, capture_output=True, text=True, env=environment)
    assert done.returncode == 0 and "Who built the ferry?" in done.stdout and "characters" in done.stdout, done.stderr
