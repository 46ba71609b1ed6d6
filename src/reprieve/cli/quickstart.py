"""`reprieve quickstart`: from a pair and a file of questions to a certified threshold, and how to serve it."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from reprieve.backends.settings import EngineSettings
from reprieve.bench.settings import CertifySettings, Promise, RunSettings
from reprieve.cli import screen
from reprieve.cli.bench import Bench, Report
from reprieve.cli.certify import Certify
from reprieve.cli.command import Command, Pipeline
from reprieve.cli.mine import MineAutoJudge
from reprieve.cli.train import TrainJudge
from reprieve.cli.trial import Trial, try_answers
from reprieve.errors import EngineError, ReprieveError, SpecError, import_extra, require_choice, require_whole
from reprieve.files import first_difference, read_json, replace_file
from reprieve.identity import digest
from reprieve.mining.settings import AutoJudgeMining
from reprieve.settings import AUTO, NumDraftTokens, PairSettings, PromptSettings, describe_format, require_draft_tokens
from reprieve.specs import quoted

if TYPE_CHECKING:
    from reprieve.heads.certificates import Certificate
    from reprieve.tasks import Task

_COMPARED = 40  # problems of the last comparison
_MOST = 10_000  # problems counted of a split
_SPLITS = ("train", "validation", "test")
_MAY_CHANGE = ("out", "dry_run", "allow_unread", "num_workers")  # settings that may differ when a run is resumed
_THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.4)  # coarser than usual: each is measured in full
_SERVER_GAIN = 16  # assumed throughput of a server relative to one answer at a time; low for a GPU
_UNTRAINED = "margin:delta=1"  # where no head could be trained
_NUM_TESTED = 4  # assumed number of thresholds tested, for the time estimate


@dataclass(frozen=True)
class Quickstart(Command):
    """Mine, train, certify and report on your own pair and data; prints the serving command. Resumes where it stopped.

    Args:
        data: JSONL file of questions and answers; `{split}` in it stands for train, validation and test.
        question: Field of the question.
        answer: Field of the reference answer.
        grader: math, number, dotted_number, alias, exact, choice, regex:PATTERN, or python:FILE.py:FUNCTION.
        prompt_template: Text file of the prompt, with {question} in it. Default: the question; for numbers and
            mathematics, with a request to reason step by step.
        stop: Texts that end a response to a raw prompt, separated by `;`.
        task: Another task instead of --data, such as gsm8k:path=gsm8k_{split}.jsonl.
        template: chat, raw, or auto: the tokenizer's chat template if it has one.
        system_prompt: System message; needs the chat template.
        thinking: on or off, for templates that support enable_thinking. Default: the template's own.
        max_new_tokens: Maximum length of an answer in tokens, including thinking.
        mine_limit: Problems to mine, from the train split.
        certify_limit: Calibration problems from the validation split, and as many held-out ones from the test split.
        max_drop: Upper bound on the loss of accuracy that the certificate proves: 0.05 is five points.
        max_growth: Upper bound on the growth of answer length that it proves: 0.25 is 25% longer.
        num_draft_tokens: K, drafted tokens per round; auto (adaptive), or auto:path=HEAD.
        num_workers: Parallel processes for mining and certifying. Default: one per core, at most 4; 1 on a GPU.
        seed: Same seed, same result.
        dry_run: Check the pair and the data, print the plan, and stop.
        allow_unread: Continue even if the grader found no answer in the trial responses, or no right one.
        out: Folder for all results; run again with it to resume.
    """

    verb = "quickstart"
    example = "reprieve quickstart --target Qwen/Qwen3-8B --draft Qwen/Qwen3-0.6B --data questions.jsonl --dry-run"

    data: Path | None = None
    question: str = "question"
    answer: str = "answer"
    grader: str = "math"
    prompt_template: Path | None = None
    stop: str = ""
    task: str | None = None
    template: str = "auto"
    system_prompt: str | None = None
    thinking: str | None = None
    max_new_tokens: int = 1024
    mine_limit: int = 400
    certify_limit: int = 400
    max_drop: float = 0.05
    max_growth: float | None = 0.25
    num_draft_tokens: NumDraftTokens = AUTO
    num_workers: int | None = None
    seed: int = 0
    dry_run: bool = False
    allow_unread: bool = False
    engine: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/quickstart")

    def __post_init__(self) -> None:
        require_choice("template", self.template, ("auto", "chat", "raw"))
        if (self.data is None) == (self.task is None):
            given = "both" if self.task else "neither"
            raise SpecError(f"quickstart takes either --data FILE.jsonl or --task, got {given}")
        if self.engine.engine.startswith("openai"):
            raise SpecError(
                "engine must be local, vllm or ray: a running server cannot load the head that quickstart trains"
            )
        if self.engine.batched:
            raise SpecError(f"engine must be local, vllm or ray, got {self.engine.engine!r}")
        if not self.engine.local and self.num_workers not in (None, 1):
            raise SpecError("--workers applies to --engine local only; set parallel= in --engine instead")
        _ = self._promise  # refuses bounds out of range
        require_draft_tokens(self.num_draft_tokens)
        for name in ("mine_limit", "certify_limit", "max_new_tokens"):
            require_whole(name, getattr(self, name), 1)

    def run(self) -> int:
        for module, extra in (("sklearn", "labels"), ("matplotlib", "evidence")):
            import_extra(module, extra)  # before hours of mining
        from reprieve.heads.certificates import Certificate

        prompt, num_mined, num_certified, provable = self._check_and_plan()
        if self.dry_run:
            return 0
        self._require_same_start()
        self.keep_config(self.out)
        stages = Pipeline(self.out, "quickstart")
        arm, certificate, failure = _UNTRAINED, None, ""
        try:
            stages.run("mine", self._mining(prompt, num_mined))
            trainer = TrainJudge(labels=self.out / "labels", pair=self.pair, out=self.out / "head", offers_length=False)
            stages.run("train", trainer)
            arm = f"judge:path={self.out / 'head'}"
            if provable:
                status = stages.run("certify", self._certification(prompt, arm, num_certified), results=(0, 1))
                certificate = Certificate.load(self._certificate_path) if status == 0 else None
        except EngineError:
            raise
        except ReprieveError as error:
            failure = f"{error}. The report and a strict policy follow; run again to resume from this stage"
            screen.warn(failure)
        arm = arm if certificate is None else certificate.rule
        self._write_policy(arm, certificate)
        # A separate folder after a failure: once the failed stage succeeds, `bench` gets a run with other arms.
        unfinished = "-untrained" if arm == _UNTRAINED else "-uncertified"
        folder = self.out / f"bench{unfinished if failure else ''}"
        stages.run("bench", self._comparison(prompt, arm, num_certified, folder))
        folders = (folder, *([] if certificate is None else [self.out / "certificates"]))
        title = f"{self.pair.target} on {self.data or self.task}"
        stages.run("report", Report(folders=folders, title=title, out=self.out / "report.html"))
        self._say_how_to_serve(certificate)
        return 1 if failure else 0

    def _mining(self, prompt: PromptSettings, limit: int) -> MineAutoJudge:
        settings = AutoJudgeMining(
            task=self.task_spec,
            split="train",
            limit=limit,
            prompt=prompt,
            seed=self.seed,
            engine=self.engine,
            pair=self.pair,
        )
        return MineAutoJudge(settings=settings, num_workers=self._workers(), out=self.out / "labels")

    def _run_settings(self, prompt: PromptSettings, split: str, limit: int) -> RunSettings:
        return RunSettings(task=self.task_spec, split=split, limit=limit, prompt=prompt, seed=self.seed)

    def _certification(self, prompt: PromptSettings, rule: str, limit: int) -> Certify:
        settings = CertifySettings(
            rule=rule,
            promise=self._promise,
            thresholds=_THRESHOLDS,
            num_draft_tokens=self._num_draft_tokens,
            held_out_limit=limit,
            run=self._run_settings(prompt, "validation", limit),
        )
        return Certify(
            settings=settings,
            num_workers=self._workers(),
            engine=self.engine,
            pair=self.pair,
            out=self.out / "certificates",
        )

    def _comparison(self, prompt: PromptSettings, arm: str, limit: int, folder: Path) -> Bench:
        return Bench(
            arm=(arm,),
            num_draft_tokens=(self._num_draft_tokens,),
            settings=self._run_settings(prompt, "test", min(_COMPARED, limit)),
            engine=self.engine,
            pair=self.pair,
            out=folder,
        )

    @property
    def _promise(self) -> Promise:
        return Promise(self.max_drop, max_growth=self.max_growth)

    def _require_same_start(self) -> None:
        """Refuse a folder whose stages used other data or settings."""
        files = [self.data, self.prompt_template]
        if self.grader.startswith("python:"):
            files.append(Path(self.grader.removeprefix("python:").rpartition(":")[0]))
        digests = {str(path): digest(path.read_bytes()) for path in files if path is not None and path.is_file()}
        given = dataclasses.asdict(self) | {"pair": self.pair.models}
        started = {key: str(value) for key, value in given.items() if key not in _MAY_CHANGE} | digests
        path = self.out / "started.json"
        if not path.exists():
            replace_file(path, json.dumps(started, indent=2) + "\n")
            return
        before = read_json(path, "the run's settings")
        before = before if isinstance(before, dict) else {}
        if (key := first_difference(started, before)) is not None:
            what = f"{key} = {before.get(key)!r} instead of {started.get(key)!r}"
            what = f"other contents of {key}" if key in digests else what
            raise ReprieveError(f"--out {str(self.out)!r} was started with {what}; name another folder")

    @property
    def task_spec(self) -> str:
        """Specification of the task, for all stages."""
        if self.data is None:
            return str(self.task)
        given = {
            "path": str(self.data),
            "question": self.question,
            "answer": self.answer,
            "grader": self.grader,
            "template": None if self.prompt_template is None else str(self.prompt_template),
            "stop": self.stop,
        }
        return "jsonl:" + ",".join(f"{name}={quoted(value)}" for name, value in given.items() if value)

    def _check_and_plan(self) -> tuple[PromptSettings, int, int, bool]:
        """Check the data and the pair with trial answers, and print what can be proved and the plan with its costs.

        Returns:
            the prompt settings, how many problems to mine and to certify on, and whether those can prove the promise.
        """
        from reprieve.models.stored import stored_positions
        from reprieve.tasks import load_task
        from reprieve.tasks.prompting import with_prompts

        plain = load_task(self.task_spec)
        if not plain.graded:
            raise SpecError(f"task {plain.name} has no reference answers: nothing can be certified on it")
        num_mined, num_certified = self._choose_sizes(plain)
        with contextlib.closing(screen.make_engine(self.engine, self.pair)) as engine:
            has_template = bool(getattr(engine.tokenizer, "chat_template", None))
            prompt = PromptSettings(
                chat_template=self.template == "chat" or (self.template == "auto" and has_template),
                system_prompt=self.system_prompt,
                thinking=self.thinking,
                max_new_tokens=self.max_new_tokens,
            )
            task = with_prompts(plain, engine.tokenizer, prompt)
            stages = [task.problems(split, max(num_mined, num_certified)) for split in _SPLITS]
            task.fit([problem for problems in stages for problem in problems], stored_positions(self.pair))
            prompt = dataclasses.replace(prompt, max_new_tokens=task.max_new_tokens)
            facts = engine.facts
            server = " ".join(filter(None, (facts.engine_version, facts.runner)))
            where = facts.device if self.engine.local else f"{facts.engine} {server}"
            pair = f"{facts.pair.target} and {facts.pair.draft}, {facts.dtype} on {where}"
            screen.say(f"pair: {pair}; prompts: {describe_format(prompt.format)}")
            trial = try_answers(engine, task, self.task_spec, self._num_draft_tokens, seed=self.seed)
        del engine
        gc.collect()
        trial.print_summary(task.max_new_tokens)
        provable = self._report_provable(trial, num_certified, task.max_new_tokens)
        self._print_plan(trial, num_mined, num_certified, provable=provable)
        if doubt := trial.doubt:
            screen.warn(doubt)
            if not (self.dry_run or self.allow_unread or screen.confirm("Continue anyway?")):
                raise ReprieveError("stopped before mining; --allow-unread continues anyway")
        return prompt, num_mined, num_certified, provable

    def _choose_sizes(self, task: Task) -> tuple[int, int]:
        """Print the number of problems, and choose how many to mine and to certify on; refuses too few."""
        sizes = {split: len(task.problems(split, _MOST)) for split in _SPLITS}
        words = (f"{size}{' or more' if size == _MOST else ''} {split}" for split, size in sizes.items())
        screen.say(f"data: {self.data or self.task}: {', '.join(words)}")
        num_mined = min(self.mine_limit, sizes["train"])
        num_certified = min(self.certify_limit, sizes["validation"], sizes["test"])
        if num_mined < 2 or num_certified < 2:
            raise SpecError(
                "each split must hold 2 problems or more: add data, or raise --mine-limit or --certify-limit"
            )
        return num_mined, num_certified

    def _report_provable(self, trial: Trial, num_certified: int, budget: int) -> bool:
        """Print how many problems the promise needs; returns whether there are enough."""
        from reprieve.certify.fixed_sequence import num_needed

        needed = num_needed(self._promise, answer_length=trial.mean("num_tokens"), budget=budget)
        promise = f"a loss below {100 * self.max_drop:g} points" + (
            "" if self.max_growth is None else f" and growth below {100 * self.max_growth:g}%"
        )
        if num_certified >= needed:
            screen.say(
                f"provable: {promise}, if the rule changes few answers: {needed} calibration problems or more are "
                f"needed, there are {num_certified}"
            )
            return True
        screen.warn(
            f"{num_certified} calibration problems cannot prove {promise}: {needed} or more are needed. Certification "
            "is skipped, and the policy decodes losslessly by default; add data, raise --certify-limit, --max-drop or "
            "--max-growth, or lower --max-new-tokens to what answers need"
        )
        return False

    def _print_plan(self, trial: Trial, num_mined: int, num_certified: int, *, provable: bool) -> None:
        """Print the plan, with an estimated time for each stage."""
        shared = self._workers() * (1 if self.engine.local else _SERVER_GAIN)
        # A rollout from half of the answer for every second round; rollouts and a server's answers share forwards.
        seconds, num_rounds = trial.mean("seconds"), max(1.0, trial.mean("num_rounds"))
        mining = num_mined * seconds * (1 + num_rounds / 2) / 3 / shared
        certifying = num_certified * seconds * (1 + _NUM_TESTED + 2) / shared
        num_compared = min(_COMPARED, num_certified)
        # Lossless, the rule and the draft alone, and the target alone, which needs a forward for each token.
        comparing = num_compared * seconds * (3 + trial.mean("num_tokens") / num_rounds)
        proof = (
            f"certify a loss below {100 * self.max_drop:g} points on {num_certified} problems and confirm it on as "
            f"many others (about {_minutes(certifying)})"
            if provable
            else "no certificate"
        )
        screen.say(
            f"plan: mine {num_mined} problems (about {_minutes(mining)}), train a head, {proof}, compare on "
            f"{num_compared} (about {_minutes(comparing)}), write the report and the policy. Everything goes to "
            f"{self.out}; Ctrl-C keeps what is done"
        )

    @property
    def _num_draft_tokens(self) -> NumDraftTokens:
        return self.engine.draft_tokens(self.num_draft_tokens)[0]

    def _workers(self) -> int:
        if self.num_workers is not None or not self.engine.local:
            return self.num_workers or 1
        import torch

        on_gpu = torch.cuda.is_available() if self.pair.device is None else self.pair.device != "cpu"
        return 1 if on_gpu else min(os.cpu_count() or 1, 4)

    @property
    def _certificate_path(self) -> Path:
        from reprieve.certify.procedure import certificate_path

        return certificate_path(self.out / "certificates", "judge", self._promise)

    @property
    def _policy_path(self) -> Path:
        return self.out / "policy.json"

    def _write_policy(self, rule: str, certificate: Certificate | None) -> None:
        """Write the policy that servers take: at the certified threshold, or strict where nothing was certified."""
        head = self.out / "head"
        about = {"rule": rule.replace(f"path={head}", f"path={head.resolve()}")}
        if certificate is None:
            about["default"] = "strict"
        else:
            about |= {"certificate": str(self._certificate_path.resolve()), "default": "certified"}
        replace_file(self._policy_path, json.dumps(about, indent=2) + "\n")

    def _say_how_to_serve(self, certificate: Certificate | None) -> None:
        """Print the paths of the report and the policy, the promise, and the command that serves the policy."""
        policy = self._policy_path
        screen.say(f"\nreport: {self.out / 'report.html'}   policy: {policy}")
        if certificate is None:
            screen.warn(
                "no certificate: the policy decodes losslessly unless a request asks for a threshold. For one, run in "
                "another folder (--out) with more problems (--certify-limit), a weaker promise (--max-drop) or more "
                "labels (--mine-limit)"
            )
        else:
            screen.say(certificate.statement)
        if self.engine.local:
            models = {"--target": self.pair.target, "--draft": self.pair.draft, "--dtype": self.pair.dtype}
            given = [part for flag, value in models.items() if value is not None for part in (flag, value)]
            k = ["--num-draft-tokens", str(self._num_draft_tokens)]
            screen.say(f"serve it: {shlex.join(['reprieve', 'serve', *given, '--rule', str(policy), *k])}")
            screen.say("for vLLM, certify on vLLM: the same command with --engine vllm and another --out")
        elif certificate is not None:
            screen.say(f"serve it: {self._vllm_command(certificate, policy)}")

    def _vllm_command(self, certificate: Certificate, policy: Path) -> str:
        """Return the command that serves with vLLM under the measured conditions."""
        from reprieve.backends.deployers import PAIR, ServerPlan, VllmDeployer
        from reprieve.backends.settings import VllmSettings

        settings = self.engine.servers
        assert isinstance(settings, VllmSettings)
        conditions = certificate.conditions
        deployer = VllmDeployer(settings, self.pair, conditions.dtype)
        assert isinstance(conditions.num_draft_tokens, int)  # servers have no other
        deployment = deployer.deployment(ServerPlan(PAIR, conditions.num_draft_tokens, conditions.drafter))
        command = shlex.join(["vllm", "serve", deployment.model, *deployment.flags(settings, policy.resolve())])
        return f"VLLM_USE_V2_MODEL_RUNNER={int(settings.runner == 'v2')} {command}" if settings.runner else command


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
