"""specdec simulate: what it computes, and that the step policy reaches what is promised of it."""

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from specdec.cli import main
from specdec.errors import SettingsError
from specdec.router.measured import CycleReport, StepPolicy
from specdec.simulate.command import FOUNDING, PHASE, TOTAL, WINDOW, run_seeds
from specdec.simulate.run import AcceptLengthK, FixedK, Hindsight, play
from specdec.simulate.scenario import Profile, Scenario, load_profile, load_trace, shipped

PLAIN = {"name": "p", "max_steps": 3, "verify_ms": {1: 10, 2: 12, 4: 20}, "draft_ms": {"step": 1}}
FLAT = Profile.model_validate(PLAIN | {"acceptance": [0.5, 0.5, 0.5]})


def scenario(profile: str, trace: str, seed: int = 0) -> Scenario:
    return Scenario.make(load_profile(profile), load_trace(trace), seed)


# ---- the model


def test_a_cycle_costs_what_the_profile_says():
    assert FLAT.cycle_ms(1, 0, 0, 0, 1.0, 1.0) == 10
    assert FLAT.cycle_ms(1, 2, 2, 0, 1.0, 1.0) == 16 + 2  # between two points, and two draft steps
    assert FLAT.cycle_ms(4, 4, 1, 0, 1.0, 1.0) == 20 + 4 * 4 + 1  # beyond the last
    assert FLAT.cycle_ms(1, 1, 1, 0, 2.0, 5.0) == 24 + 5
    assert FLAT.stood(1.0) == [0, 0.5, 0.75, 0.875]
    assert FLAT.stood(0.0) == [0, 0, 0, 0]


def test_plain_cycles_may_have_a_path_of_their_own_and_run_ahead_hides_drafting():
    other = Profile.model_validate(PLAIN | {"plain_ms": {1: 9}, "hidden_ms": 2.5, "acceptance": [0.5] * 3})
    assert other.cycle_ms(1, 0, 0, 0, 1.0, 1.0) == 9
    assert other.cycle_ms(1, 1, 1, 0, 1.0, 1.0) == 12
    assert other.draft_wait_ms(1, 3, 1.0) == 0.5


@pytest.mark.parametrize("k", [0, 1, 3])
def test_a_fixed_k_yields_what_hindsight_expects_of_it(k):
    one = scenario("founding-8-gpus", "acceptance-steps")
    expected = Hindsight(one).tokens[k]
    run = play(one, FixedK(k))
    assert run.tokens[-1] == pytest.approx(expected[-1], rel=0.01)
    assert run.realised == pytest.approx(expected[-1], rel=0.03)
    assert np.interp(40, np.arange(len(expected)) / 10, run.tokens) == pytest.approx(expected[400], rel=0.02)


@pytest.mark.parametrize("trace", ["bursts", "load-sawtooth", "acceptance-steps"])
def test_plain_decoding_scores_one_in_every_ten_seconds(trace):
    one = scenario("cpu", trace)
    score = Hindsight(one).score(play(one, FixedK(0)))
    assert score.of_plain == pytest.approx(1)
    assert score.of_plain_window == pytest.approx(1, abs=1e-3)
    other = Hindsight(one).score(play(one, FixedK(8)))
    assert other.of_plain_window < 0.99


def test_the_founding_case_is_the_one_that_was_measured():
    steady = scenario("founding-8-gpus", "steady")
    rates = Hindsight(steady).rates(0)
    assert rates[5] == pytest.approx(71.3, rel=0.03)
    assert rates[0] == pytest.approx(90, rel=0.02)


def test_a_trace_changes_what_it_names_and_a_seed_is_a_seed():
    one, again, other = (scenario("cpu", "bursts", seed) for seed in (1, 1, 2))
    assert one == again
    assert one.batch != other.batch
    assert set(one.batch) == {1, 12}
    drift = scenario("founding-1-gpu", "cost-drift")
    assert (drift.draft[100], drift.draft[400]) == (1, 5)
    assert drift.context[-60] > 10 * drift.context[0]
    saw = scenario("founding-1-gpu", "load-sawtooth")
    assert (min(saw.batch), max(saw.batch)) == (1, 16)


def test_orders_take_effect_after_the_lag():
    class FakeOnce:
        def __init__(self):
            self.calls, self.ran = 0, []

        def steps(self, batch, context):
            self.calls += 1
            return 2 if self.calls == 5 else 0

        def observe(self, report: CycleReport):
            self.ran.append(report.steps)

    policy = FakeOnce()
    one = scenario("dense-8b-h200", "steady")
    play(one, policy)
    assert policy.ran.index(2) == 4 + one.profile.lag


# ---- the policy: what is promised, on a few of the seeds that `specdec simulate --check` runs


@pytest.mark.parametrize("profile", shipped("profiles"))
@pytest.mark.parametrize("trace", ["steady", "acceptance-steps", "load-sawtooth"])
def test_it_is_never_slower_than_plain_decoding_and_near_the_best_fixed_k(profile, trace):
    row = run_seeds(profile, trace, range(2))
    assert row.of_plain >= TOTAL
    assert row.of_plain_window >= WINDOW
    assert row.of_best >= PHASE
    assert row.of_best_phase >= 0.955  # two seeds may be the unlucky ones
    assert row.auto >= FOUNDING.get(profile, 0) or trace != "steady"


@pytest.mark.parametrize(
    ("policy", "profile"),
    [(FixedK(5), "founding-8-gpus"), (FixedK(2), "moe-width"), (AcceptLengthK(5), "founding-8-gpus")],
)
def test_policies_that_know_no_cost_fail_the_same_test(policy, profile):
    one = scenario(profile, "acceptance-steps")
    score = Hindsight(one).score(play(one, policy))
    assert score.of_plain < TOTAL
    assert score.of_plain_window < 0.955
    assert score.of_best < PHASE


def test_a_policy_blind_to_acceptance_or_to_cost_fails_it_too():
    class MutantOptimist(StepPolicy):
        """Believes that all drafts stand."""

        def observe(self, report):
            super().observe(
                CycleReport(
                    *(report.batch, report.context, report.steps, report.cycle_s, report.draft_s),
                    *(report.proposed, report.proposed),
                )
            )

    class MutantClockless(StepPolicy):
        """Believes that all cycles take as long."""

        def observe(self, report):
            super().observe(
                CycleReport(report.batch, report.context, report.steps, 0.01, 0.0, report.proposed, report.accepted)
            )

    one = scenario("founding-8-gpus", "acceptance-steps")
    for mutant in (MutantOptimist(5), MutantClockless(5)):
        assert Hindsight(one).score(play(one, mutant)).of_plain < TOTAL


def test_sessions_without_hope_do_not_cost_the_others_their_drafts():
    one = scenario("dense-8b-h200", "mixed-sessions")
    score = Hindsight(one).score(play(one, StepPolicy(7)))
    assert score.of_best > 1.05  # no fixed k can leave them out


# ---- the command


def test_it_prints_a_table_and_draws(tmp_path, capsys):
    plot = tmp_path / "plot.svg"
    argv = ["simulate", "--profiles", "cpu", "--traces", "steady", "--seeds", "1", "--jobs", "1", "--plot", str(plot)]
    assert main([*argv, "--check"]) == 0
    out = capsys.readouterr().out
    assert "cpu" in out
    assert "all reached" in out
    root = ElementTree.parse(plot).getroot()
    assert root.tag.endswith("svg")
    assert len([node for node in root.iter() if node.tag.endswith("polyline")]) == 4


def test_own_files_json_and_a_goal_that_is_missed(tmp_path, capsys):
    profile = tmp_path / "erratic.yaml"
    profile.write_text("max_steps: 2\nverify_ms: {1: 10, 3: 30}\ndraft_ms: {step: 50}\nacceptance: [0.0, 0.0]\n")
    trace = tmp_path / "short.yaml"
    trace.write_text("duration_s: 12\nphase_s: 0.5\n")
    argv = ["simulate", "--profiles", str(profile), "--traces", str(trace), "--seeds", "1", "--jobs", "1"]
    assert main([*argv, "--first-seed", "3", "--json", "--check"]) in (0, 1)
    result = json.loads(capsys.readouterr().out)
    assert (result["first_seed"], result["seeds"]) == (3, 1)
    assert result["rows"][0]["profile"] == "erratic"
    assert result["rows"][0]["fixed"][0] == pytest.approx(100, rel=0.02)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_steps: 2\n", "verify_ms"),
        ("max_steps: 2\nverify_ms: {1: 10}\ndraft_ms: {step: 1}\nacceptance: [0.5]\n", "acceptance has 1 positions"),
        ("- a list\n", "mapping"),
        ("{", "expected"),
    ],
)
def test_a_bad_profile_says_what_is_wrong(tmp_path, text, words):
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        load_profile(str(path))


def test_an_unknown_name_says_which_there_are(capsys):
    assert main(["simulate", "--traces", "calm", "--seeds", "1"]) == 2
    err = capsys.readouterr().err
    assert "calm" in err
    assert "acceptance-steps" in err


def test_a_track_has_one_shape(tmp_path):
    path = tmp_path / "two.yaml"
    path.write_text("duration_s: 20\nphase_s: 20\nbatch: {hold: [[0, 1]], ramp: [[0, 1]]}\n")
    with pytest.raises(SettingsError, match="one of hold"):
        load_trace(str(path))
