"""Measurements for certificates: paired answers on a calibration split, then on held-out problems."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from reprieve.backends.settings import LOCAL
from reprieve.bench.arms import LOSSLESS, RERUN, Arm, make_arm, rule_of
from reprieve.bench.engine import Engine, RunConfig
from reprieve.bench.results import Environment
from reprieve.bench.run import Run
from reprieve.bench.settings import CertifySettings, Promise, RunSettings
from reprieve.bench.summary import Problems, column, common_rows
from reprieve.bundles import BUNDLED_HEADS
from reprieve.certify.fixed_sequence import Lengths, PairedTest, RiskTest, ThresholdStep, num_needed, paired_test, walk
from reprieve.errors import ReprieveError, SpecError
from reprieve.files import replace_file
from reprieve.heads.certificates import Certificate, portable_spec
from reprieve.heads.files import CERTIFICATES
from reprieve.heads.loading import attach_heads, name_problems, seen_problems
from reprieve.rules import Rule, parse_rule
from reprieve.rules.learned import LearnedRule
from reprieve.stats import paired_difference
from reprieve.tasks import Task
from reprieve.types import Progress, no_progress

# Default thresholds of rules whose dial is a probability.
PROBABILITIES = (0.005, 0.01, 0.02, 0.03, 0.05, 0.08, 0.12, 0.2, 0.3, 0.5)
Noise = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Certification settings with the rule ready to use.

    Args:
        rule: at any threshold, heads attached.
    """

    settings: CertifySettings
    rule: Rule
    target: str | None = None  # the pair's

    @classmethod
    def of(cls, settings: CertifySettings, *, target: str | None = None) -> Plan:
        """Parse and check the rule.

        Args:
            target: name of the pair's target, whose bundled heads are used if the rule names none.

        Raises:
            SpecError: a rule that cannot be certified, or no thresholds for one that has no usual ones.
        """
        rule = attach_heads(parse_rule(settings.rule), target)
        if rule.dial is None:
            raise SpecError(f"rule {rule.name} loses nothing: there is nothing to certify")
        plan = cls(settings, rule, target)
        plan.candidates()
        return plan

    @property
    def promise(self) -> Promise:
        return self.settings.promise

    @property
    def held_out(self) -> RunSettings:
        """Settings of the second measurement: other problems, otherwise equal."""
        run, split = self.settings.run, self.settings.held_out_split
        offset = run.offset + run.limit if split == run.split else 0
        return dataclasses.replace(run, split=split, limit=self.settings.held_out_limit, offset=offset)

    def arm(self, rule: Rule | str) -> Arm:
        """Return an arm of this pair at the plan's K."""
        return make_arm(rule, self.settings.num_draft_tokens, target=self.target)

    @cached_property
    def strict(self) -> Arm:
        """The lossless arm."""
        return self.arm(LOSSLESS)

    @cached_property
    def again(self) -> Arm:
        """The lossless arm with other draws."""
        return self.arm(RERUN)

    @property
    def lossless_labels(self) -> set[str]:
        """Labels of both lossless arms."""
        return {self.strict.label, self.again.label}

    def candidates(self) -> list[Rule]:
        """Return the rule at each threshold, from strict to lenient.

        Raises:
            SpecError: no thresholds for a rule that has no usual ones, or a value out of range.
        """
        usual = PROBABILITIES if isinstance(self.rule, LearnedRule) else ()
        values = self.settings.thresholds or usual
        if not values:
            assert self.rule.dial is not None
            raise SpecError(f"rule {self.rule.name} needs --thresholds: values of {self.rule.dial.name} to try")
        return sorted((self.rule.with_dial(value) for value in values), key=lambda rule: rule.leniency)


@dataclass(frozen=True)
class Certification:
    """Outcome of certification: a certificate, or the reason for its absence."""

    steps: list[ThresholdStep]
    certificate: Certificate | None
    reason: str = ""
    path: Path | None = None  # path of the certificate


def certificate_path(folder: Path, rule_name: str, promise: Promise) -> Path:
    """Return the file that `certify` writes a certificate to."""
    return folder / f"{rule_name}-net_drop-{promise.max_drop:g}.json"


def certify(
    plan: Plan,
    engine: Engine,
    task: Task,
    folder: Path,
    *,
    command: str,
    on_claimed: Callable[[], None] = lambda: None,
    announce: Callable[[str], None] = lambda line: None,
    progress: Progress = no_progress,
) -> Certification | None:
    """Walk the thresholds, confirm on held-out problems, and write the certificate; None if Ctrl-C ended it.

    Another rule certified into the same folder shares the strict answers. The promise rests on the calibration problems
    alone. The held-out ones are a second, independent check: if their observed loss reaches the bound, no certificate
    is written.

    Args:
        on_claimed: called once the folder is this run's.

    Raises:
        SpecError: an invalid plan, a task without reference answers, problems that a head of the rule was trained on or
            that both sets hold, or thresholds that differ from the first ones tested on these problems.
        ReprieveError: the folder holds another run, or answers failed.
    """
    if not task.graded:
        raise SpecError(f"task {task.name} has no reference answers: nothing can be certified on it")
    _require_unseen(plan, task)
    strict, again = plan.strict, plan.again
    arms = {float(rule.dial_value or 0): plan.arm(rule) for rule in plan.candidates()}  # strictest first

    def run_of(settings: RunSettings, chosen: list[Arm], name: str) -> Run:
        config = RunConfig.of(engine, chosen, settings, command=command)
        return Run(config, chosen, engine, task, folder / name, extendable=True)

    def answer(run: Run, arm: Arm) -> None:
        if not run.measure([strict], progress) or not run.measure([arm], progress):
            raise KeyboardInterrupt

    def measure(run: Run, threshold: float) -> ThresholdStep:
        answer(run, arms[threshold])
        return ThresholdStep(threshold, *_test(plan, run, arms[threshold], task.max_new_tokens))

    engine.expect([strict, again, *arms.values()], plan.settings.run.drafter)
    served = engine.facts.engine != LOCAL  # a server's batches do not reproduce greedy answers exactly
    calibration = run_of(plan.settings.run, [strict, *([again] if served else []), *arms.values()], "calibration")
    _require_first_walk(plan, calibration, {arm.label for arm in arms.values()})
    on_claimed()
    noise = None
    try:
        if served:
            answer(calibration, again)
            noise = _noise_floor(calibration, strict, again)
            announce(_noise_line(noise))
        steps = walk(
            list(arms),
            lambda threshold: measure(calibration, threshold),
            on_step=lambda step: announce(_line(plan, step)),
        )
        passed = [step.threshold for step in steps if step.evidence.passed]
        if not passed:
            reason = "no threshold passed: already the strictest could not be proved"
            return Certification(steps, None, f"{reason}. {_needed(plan, calibration, task)}")
        best = arms[passed[-1]]
        held_out = run_of(plan.held_out, [strict, best], "held_out")
        held_step = measure(held_out, passed[-1])
    except KeyboardInterrupt:
        return None
    announce(_line(plan, held_step, where="held out"))
    return _conclude(_Measured(plan, best, steps, held_step, calibration, held_out, noise), folder)


def _conclude(measured: _Measured, folder: Path) -> Certification:
    """Write the certificate into a folder and beside the rule's heads, unless the held-out problems contradict it."""
    promise, evidence = measured.plan.promise, measured.held_step.evidence
    against = {"observed": evidence.observed} if evidence.observed >= promise.max_drop else {}
    against |= {risk.name: risk.observed for risk in evidence.risks if risk.contradicted}
    if against:
        name, value = next(iter(against.items()))
        return Certification(measured.steps, None, f"the held-out problems contradict it: {name} {value:.4f}")
    certificate = measured.certificate()
    content = certificate.to_json()
    path = certificate_path(folder, measured.arm.rule_name, promise)
    replace_file(path, content)
    engine = "" if certificate.conditions.engine == LOCAL else f"-{certificate.conditions.engine}"
    name = f"net_drop-{promise.max_drop:g}-{certificate.threshold:g}{engine}.json"
    assert measured.arm.rule is not None
    for head, _ in measured.arm.rule.heads:
        if head not in BUNDLED_HEADS and Path(head).is_dir():  # a user's own folder
            replace_file(Path(head) / CERTIFICATES / name, content)
    return Certification(measured.steps, certificate, path=path)


def _needed(plan: Plan, calibration: Run, task: Task) -> str:
    """Say how many calibration problems the promise takes at least, and how many there were."""
    lengths = [record.num_tokens for record in calibration.records if record.arm == plan.strict.label]
    needed = num_needed(plan.promise, answer_length=float(np.mean(lengths)), budget=task.max_new_tokens)
    return (
        f"This promise takes {needed} calibration problems where the rule changes no answer, and more where it does; "
        f"there were {len(calibration.problems)} (--limit, --max-drop)"
    )


def _require_unseen(plan: Plan, task: Task) -> None:
    """Refuse calibration and held-out problems that a head was trained on, or that overlap."""
    settings = (plan.settings.run, plan.held_out)
    both = [task.problems(part.split, part.limit, offset=part.offset) for part in settings]
    for name, problems in zip(("calibration", "held-out"), both, strict=True):
        if seen := seen_problems(plan.rule, problems):
            raise SpecError(
                f"{len(seen)} of the {name} problems are among those that a head of {plan.rule.spec} was made from "
                f"({name_problems(seen)}): certify on others (--split, --offset)"
            )
    calibration = {problem.digest for problem in both[0]}
    if twice := [problem for problem in both[1] if problem.digest in calibration]:
        raise SpecError(
            f"{len(twice)} of the held-out problems are also calibration problems ({name_problems(twice)}): "
            "choose others (--offset, --held-out-split)"
        )


def _require_first_walk(plan: Plan, calibration: Run, labels: set[str]) -> None:
    """Refuse thresholds tested after others on these problems: retrying until one passes proves nothing."""
    earlier = {record.arm for record in calibration.records} - labels - plan.lossless_labels
    if same := sorted(label for label in earlier if parse_rule(rule_of(label)).name == plan.rule.name):
        raise SpecError(
            f"thresholds must be those first tried on these problems, {', '.join(same)}: choosing others after looking "
            "breaks the promise; calibrate on other problems (--offset) into another folder"
        )


@dataclass(frozen=True)
class _Measured:
    """All that a certificate tells."""

    plan: Plan
    arm: Arm  # of the last threshold that passed
    steps: list[ThresholdStep]
    held_step: ThresholdStep
    calibration: Run
    held_out: Run
    noise: Noise | None

    def certificate(self) -> Certificate:
        """Return the certificate of the last step that passed."""
        rule, evidence = self.arm.rule, self.held_step.evidence
        assert rule is not None
        return Certificate(
            statement=self._statement(),
            rule=rule.spec,
            portable_rule=portable_spec(rule),
            threshold=float(self.held_step.threshold),
            promise={**dataclasses.asdict(self.plan.promise), "loss": "net_drop"},
            verdict="confirmed" if evidence.passed else "consistent",
            conditions=self.calibration.config.conditions(self.calibration.engine, self.arm),
            calibration={
                **_where(self.calibration, self.plan),
                "num_thresholds_tried": len(self.steps),
                "steps": [_plain(step) for step in self.steps],
                **({} if self.noise is None else {"noise_floor": self.noise}),
            },
            held_out={
                **_where(self.held_out, self.plan),
                "tokens_per_round": self.held_step.tokens_per_round,
                **_plain(evidence),
            },
            made_with={"command": self.calibration.config.command, **dataclasses.asdict(Environment.here())},
        )

    def _statement(self) -> str:
        promise, facts, held = self.plan.promise, self.calibration.engine.facts, self.held_step.evidence
        proved = next(step.evidence for step in self.steps if step.threshold == self.held_step.threshold)
        where = noise = ""
        if self.noise is not None:
            runner = facts.runner and f"({facts.runner})"
            where = " on " + " ".join(filter(None, (facts.engine, facts.engine_version, runner)))
            noise = f" {_noise_line(self.noise)}"
        return (
            f"With {100 * promise.confidence:g}% confidence, {self.arm.label} loses less than "
            f"{100 * promise.max_drop:g} points of problems solved against lossless decoding on task "
            f"{self.calibration.config.task} at K = {self.arm.num_draft_tokens}{where}, where lossless solves "
            f"{100 * proved.accuracy_strict:.1f}%. Calibrated on {proved.num_problems} problems (observed "
            f"{100 * proved.observed:+.2f} points, at most {100 * proved.upper_bound:.2f}); on {held.num_problems} "
            f"held-out problems it lost {100 * held.observed:+.2f} points (at most {100 * held.upper_bound:.2f})."
            + "".join(map(_risk_sentence, proved.risks))
            + noise
        )


def _test(plan: Plan, run: Run, arm: Arm, budget: int) -> tuple[PairedTest, float | None]:
    """Compare an arm's answers with the strict ones; return the test, and the arm's tokens per round.

    Raises:
        ReprieveError: answers failed, or no strict answer is right.
    """
    labels = [plan.strict.label, arm.label]
    rows = _answered(run, labels)
    strict, relaxed = (column(rows[label], lambda record: record.correct) for label in labels)
    if not strict.any():
        raise ReprieveError(
            "lossless decoding solved none of the problems: there is nothing to lose, and so nothing to certify; check "
            "the task's grader and answers, and how the model is asked"
        )
    tokens = [column(rows[label], lambda record: record.num_tokens) for label in labels]
    cut = [column(rows[label], lambda record: record.finish_reason == "length") for label in labels]
    rounds = column(rows[labels[1]], lambda record: record.num_rounds).sum()
    tokens_per_round = float(tokens[1].sum() / rounds) if rounds else None
    lengths = Lengths(tokens[0], tokens[1], cut[0], cut[1], budget)
    return paired_test(plan.promise, strict, relaxed, lengths), tokens_per_round


def _answered(run: Run, labels: list[str]) -> dict[str, Problems]:
    """Return the answers of some arms, by problem.

    Raises:
        ReprieveError: answers failed.
    """
    rows = common_rows(labels, run.records, run.config.num_trials)
    if failed := sum(record.error is not None for label in labels for trials in rows[label] for record in trials):
        raise ReprieveError(
            f"{failed} answers failed; a certificate needs all of them: run again to try them once more"
        )
    return rows


def _where(run: Run, plan: Plan) -> dict[str, Any]:
    """Return the problems of a run, and its unreadable answers, strict and relaxed. They count as wrong."""
    settings = {name: getattr(run.config, name) for name in ("split", "offset", "limit", "seed")}
    unread = [record.arm in plan.lossless_labels for record in run.records if record.unread]
    return {
        **settings,
        "problems": [problem.digest for problem in run.problems],
        "num_unread": {"strict": sum(unread), "relaxed": len(unread) - sum(unread)},
    }


def _plain(record: Any) -> dict[str, Any]:
    """Return a record as JSON holds it."""
    plain: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(record)))
    return plain


def _risk_sentence(risk: RiskTest) -> str:
    observed = f"(observed {100 * risk.observed:+.1f}, at most {100 * risk.upper_bound:.1f})"
    if risk.name == "growth":
        return f" Answers grow by less than {100 * risk.bound:g}% {observed}."
    return f" Unfinished answers grow by less than {100 * risk.bound:g} points {observed}."


def _noise_floor(run: Run, strict: Arm, again: Arm) -> Noise:
    """Compare strict answers with strict answers of the same server: differences that no rule causes."""
    rows = _answered(run, [strict.label, again.label])
    solved = [column(rows[arm.label], lambda record: record.correct) for arm in (strict, again)]
    texts = [[record.text for trials in rows[arm.label] for record in trials] for arm in (strict, again)]
    low, high = paired_difference(*solved)[1:]
    return {
        "num_problems": len(rows[strict.label]),
        "same_answers": float(np.mean([first == second for first, second in zip(*texts, strict=True)])),
        "difference": float(solved[0].mean() - solved[1].mean()),
        "difference_ci95": [low, high],
    }


def _noise_line(noise: Noise) -> str:
    low, high = noise["difference_ci95"]
    return (
        f"Noise floor: two lossless runs gave the same answer to {100 * noise['same_answers']:.1f}% of "
        f"{noise['num_problems']} problems, and the first solved {100 * noise['difference']:+.2f} points "
        f"[{100 * low:.2f}, {100 * high:.2f}] more."
    )


def _line(plan: Plan, step: ThresholdStep, where: str = "calibration") -> str:
    evidence, dial = step.evidence, plan.rule.dial.name if plan.rule.dial else "threshold"
    return (
        f"{where}: {dial} {step.threshold:g}: loss {100 * evidence.observed:+.2f} points, at most "
        f"{100 * evidence.upper_bound:.2f}, p = {evidence.p_value:.3g}, "
        + "".join(
            f"{risk.name} {100 * risk.observed:+.1f}%, at most {100 * risk.upper_bound:.1f}%, p = {risk.p_value:.3g}, "
            for risk in evidence.risks
        )
        + (f"{step.tokens_per_round:.2f} tokens per round, " if step.tokens_per_round else "")
        + ("passed" if evidence.passed else "not proved")
    )
