"""The short form of tests/chaos.py: a few kills of forked ranks, each at a random moment of a phase."""

import json
import random

import chaos
import forking
import pytest
import short_runs


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return short_runs.prepare(tmp_path_factory.mktemp("chaos"))


class Forked:
    """Runs of one way whose ranks are forked, see forking.Server; stands in for chaos.Plain."""

    def __init__(self, way, setting, name):
        self.script, self.ranks, options, _ = chaos.WAYS[way]
        self.arguments = [*setting[1], *options, *chaos.OPTIONS, "--run-name", name]
        self.plan = setting[0] / "plan.json"

    def start(self, environment, again):
        before = f"{chaos.KILLER}\nwatch(json.load(open({str(self.plan)!r})), rank)"
        arguments = [*self.arguments, *(["--resume"] if again else [])]
        status, output = forking.server().run(self.script, self.ranks, arguments, before=before)
        return not any(status), f"{output}\nexit statuses: {status}"


@pytest.mark.parametrize(
    "way, phases",
    [
        ("baseline", ["checkpoint", "results", "start-up", "training", "checkpoint", "results", "evaluation"]),
        ("ddp 2", ["training", "results", "checkpoint", "evaluation"]),
        ("fsdp 2", ["results", "checkpoint", "training"]),
    ],
)
def test_killed_runs_end_as_if_they_had_been_left_alone(setting, monkeypatch, way, phases):
    monkeypatch.setattr(chaos, "Plain", Forked)
    whole = Forked(way, setting, f"whole-{way}".replace(" ", "-"))
    finished, output, spent = chaos.one_start(whole, setting[0], {}, {"phase": None}, False)
    assert finished, output
    seed = random.randrange(2**32)
    kills = chaos.chain(way, setting, {}, spent, phases, f"{way}-killed", random.Random(seed))
    told = f"seed {seed}: {json.dumps(kills)}"
    assert all(kill["equal"] for kill in kills), told
    assert kills, told  # a moment may be later than the run's end, but hardly all of them
