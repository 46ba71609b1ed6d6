"""`reprieve quickstart`: from a pair and a file of questions to a certified threshold, and how to serve it."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reprieve.backends.settings import EngineSettings
from reprieve.bench.settings import RunSettings
from reprieve.certify.settings import CertifySettings, Promise
from reprieve.cli import screen
from reprieve.cli.bench import Bench
from reprieve.cli.certify import Certify
from reprieve.cli.command import Command
from reprieve.cli.mine import MineAutoJudge
from reprieve.cli.report import Report
from reprieve.cli.stages import Pipeline
from reprieve.cli.train_head import TrainJudge
from reprieve.errors import ReprieveError, SpecError, require_choice, require_range, require_whole
from reprieve.files import read_json, replace_file
from reprieve.heads.binding import digest
from reprieve.mining.settings import AutoJudgeMining
from reprieve.settings import AUTO, NumDraftTokens, PairSettings, PromptSettings, describe_format, require_draft_tokens
from reprieve.specs import quoted

if TYPE_CHECKING:
    from reprieve.bench.engine import Engine
    from reprieve.heads.certificates import Certificate
    from reprieve.tasks.asking import AskedTask

_NUM_TRIED = 4  # problems that speeds are measured on
_COMPARED = 40  # problems of the last comparison
_MOST = 10_000  # problems counted of a split
_FREE = ("out", "look", "unread", "num_workers")  # settings that may change from run to run
_THRESHOLDS = (0.02, 0.05, 0.1, 0.2, 0.4)  # coarser than usual: each is measured in full
_SHARED = 16  # answers that a server makes in the time of one: a guess, and a low one on a GPU
_WALKED = 4  # of them, before one cannot be proved: for the estimate


@dataclass(frozen=True)
class Quickstart(Command):
    """Mine, train, certify and report on your own pair and data; prints the serving command. Resumes where it stopped.

    Args:
        data: JSONL file of questions and answers; `{split}` in it stands for train, validation and test.
        question: Field of the question.
        answer: Field of the right answer.
        grader: exact, number, math, choice, regex:PATTERN, or python:FILE.py:FUNCTION.
        prompt_template: Text file with {question} in it: the prompt. Default: the question, asked for step by step.
        stop: Texts that end a response to a raw prompt, separated by `;`.
        task: Another task instead of --data, such as gsm8k:path=gsm8k_{split}.jsonl.
        template: chat, raw, or auto: the tokenizer's chat template if it has one.
        system_prompt: System message; needs the chat template.
        thinking: on or off, for templates that know enable_thinking. Default: the template's own.
        max_new_tokens: Largest answer, in tokens, thinking included.
        mine_limit: Problems to mine, from the train split.
        certify_limit: Calibration problems from the validation split, and as many held-out ones from the test split.
        max_drop: What the certificate promises to stay below: 0.05 is five points.
        max_growth: Growth of the answers' length that it promises to stay below: 0.25 is a quarter longer.
        num_draft_tokens: K, drafted tokens a round; auto for as many as pay, or auto:path=HEAD.
        num_workers: Processes side by side while mining and certifying. Default: the cores, at most 4; 1 on a GPU.
        seed: Same seed, same result.
        look: Look at the pair and the data, say what would be done, and stop.
        unread: Go on although no answer of the trial could be read.
        out: Folder for everything; run again with it to go on.
    """

    verb = "quickstart"

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
    look: bool = False
    unread: bool = False
    answering: EngineSettings = field(default_factory=EngineSettings)
    pair: PairSettings = field(default_factory=PairSettings)
    out: Path = Path("runs/quickstart")

    def __post_init__(self) -> None:
        require_choice("template", self.template, ("auto", "chat", "raw"))
        if (self.data is None) == (self.task is None):
            raise SpecError("quickstart needs --data FILE.jsonl, or --task, and not both")
        if self.answering.engine.startswith("openai"):
            raise SpecError("engine must start its servers here (vllm, ray): running ones lack the head to be trained")
        if not self.answering.local and self.num_workers not in (None, 1):
            raise SpecError("workers are of the local engine; servers take parallel= requests at once")
        require_range("max_drop", self.max_drop, 0.0, 0.99, low_open=True)
        require_draft_tokens(self.num_draft_tokens)
        for name in ("mine_limit", "certify_limit", "max_new_tokens"):
            require_whole(name, getattr(self, name), 1)

    def run(self) -> int:
        prompt, num_mined, num_certified, provable = self._look()
        if self.look:
            return 0
        self._require_same_start()
        self.keep_config(self.out)
        stages = Pipeline(self.out, "quickstart")
        judge = f"judge:path={self.out / 'head'}"
        stages.run("mine", self._mining(prompt, num_mined))
        stages.run("train", TrainJudge(labels=self.out / "labels", pair=self.pair, out=self.out / "head"))
        certificate = None
        if provable:
            status = stages.run("certify", self._certification(prompt, judge, num_certified), results=(0, 1))
            certificate = self._certificate() if status == 0 else None
        arm = judge if certificate is None else certificate.rule
        stages.run("bench", self._comparison(prompt, arm, num_certified))
        stages.run("report", self._report(certificate))
        self._tell_how_to_serve(arm, certificate)
        return 0

    def _mining(self, prompt: PromptSettings, limit: int) -> MineAutoJudge:
        settings = AutoJudgeMining(
            task=self.task_spec,
            split="train",
            limit=limit,
            prompt=prompt,
            seed=self.seed,
            answering=self.answering,
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
            answering=self.answering,
            pair=self.pair,
            out=self.out / "certificates",
        )

    def _comparison(self, prompt: PromptSettings, arm: str, limit: int) -> Bench:
        return Bench(
            arm=(arm,),
            num_draft_tokens=(self._num_draft_tokens,),
            settings=self._run_settings(prompt, "test", min(_COMPARED, limit)),
            answering=self.answering,
            pair=self.pair,
            out=self.out / "bench",
        )

    def _report(self, certificate: Certificate | None) -> Report:
        folders = (self.out / "bench", *([] if certificate is None else [self.out / "certificates"]))
        title = f"{self.pair.target} on {self.data or self.task}"
        return Report(folders=folders, title=title, out=self.out / "report.html")

    @property
    def _promise(self) -> Promise:
        return Promise(self.max_drop, max_growth=self.max_growth)

    def _require_same_start(self) -> None:
        """Refuse a folder whose stages stand on other data or settings.

        Raises:
            ReprieveError: names the first difference.
        """
        files = [self.data, self.prompt_template, Path(self.grader.removeprefix("python:").rpartition(":")[0] or "-")]
        digests = {str(path): digest(path.read_bytes()) for path in files if path is not None and path.is_file()}
        given = dataclasses.asdict(self) | {"pair": self.pair.models}
        ours = {key: str(value) for key, value in given.items() if key not in _FREE} | digests
        path = self.out / "started.json"
        if not path.exists():
            replace_file(path, json.dumps(ours, indent=2) + "\n")
            return
        before = read_json(path, "the run's settings")
        for key in sorted(ours.keys() | before.keys()):
            if ours.get(key) != before.get(key):
                what = f"{key} = {before.get(key)!r} instead of {ours.get(key)!r}"
                what = f"another content of {key}" if key in digests else what
                raise ReprieveError(f"--out {str(self.out)!r} was begun with {what}; name another folder")

    @property
    def task_spec(self) -> str:
        """The task, as every stage is given it."""
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

    def _look(self) -> tuple[PromptSettings, int, int, bool]:
        """Read data and pair, and say what is there and what will be done.

        Returns:
            how to ask, how many problems to mine and to certify on, and whether those can prove the promise.
        """
        from reprieve.tasks import load_task
        from reprieve.tasks.asking import ask

        plain = load_task(self.task_spec)
        if not plain.graded:
            raise SpecError(f"task {plain.name} has no right answers: nothing can be certified on it")
        sizes = {split: len(plain.problems(split, _MOST)) for split in ("train", "validation", "test")}
        told = (f"{size}{' or more' if size == _MOST else ''} {split}" for split, size in sizes.items())
        screen.say(f"data: {self.data or self.task}: {', '.join(told)}")
        from reprieve.certify.fixed_sequence import num_needed

        num_mined = min(self.mine_limit, sizes["train"])
        num_certified = min(self.certify_limit, sizes["validation"], sizes["test"])
        if num_mined < 2 or num_certified < 2:
            raise SpecError("quickstart needs two problems or more in each split: give it more data")
        from reprieve.backends.making import make_engine

        screen.quiet_transformers()
        engine = make_engine(self.answering, self.pair, announce=screen.warn)
        try:
            prompt = self._prompt(engine.tokenizer)
            task = ask(plain, engine.tokenizer, prompt)
            prompt = dataclasses.replace(prompt, max_new_tokens=self._room(task, num_mined, num_certified))
            task = ask(plain, engine.tokenizer, prompt)
            screen.say(f"pair: {_about(engine)}; prompts: {describe_format(prompt.format)}")
            answer_length = self._estimate(engine, task, num_mined, num_certified)
        finally:
            engine.close()
        del engine, task
        gc.collect()
        assert prompt.max_new_tokens is not None
        needed = num_needed(self._promise, answer_length=answer_length, budget=prompt.max_new_tokens)
        if num_certified < needed:
            screen.warn(
                f"{num_certified} calibration problems cannot prove a loss below {100 * self.max_drop:g} points"
                + ("" if self.max_growth is None else f" and growth below {100 * self.max_growth:g}%")
                + f": {needed} or more are needed. No certificate will be tried; add data, raise --max-drop or "
                "--max-growth, or lower --max-new-tokens to what answers need"
            )
        return prompt, num_mined, num_certified, num_certified >= needed

    def _room(self, task: AskedTask, *limits: int) -> int:
        """The largest answer that the models have room for behind the longest prompt."""
        from reprieve.models.identity import stored_positions

        problems = [
            problem for split in ("train", "validation", "test") for problem in task.problems(split, max(limits))
        ]
        room = stored_positions(self.pair) - max(len(problem.prompt_ids) for problem in problems)
        if room < task.max_new_tokens:
            screen.warn(f"--max-new-tokens is {room} instead of {task.max_new_tokens}: the models read no more")
        return min(room, task.max_new_tokens)

    @property
    def _num_draft_tokens(self) -> NumDraftTokens:
        return self.answering.draft_tokens(self.num_draft_tokens)[0]

    def _prompt(self, tokenizer: Any) -> PromptSettings:
        has = bool(getattr(tokenizer, "chat_template", None))
        return PromptSettings(
            chat_template=self.template == "chat" or (self.template == "auto" and has),
            system_prompt=self.system_prompt,
            thinking=self.thinking,
            max_new_tokens=self.max_new_tokens,
        )

    def _estimate(self, engine: Engine, task: AskedTask, num_mined: int, num_certified: int) -> float:
        """Answer a few problems, and say how fast, how well and how long all of it will take; the mean length."""
        from reprieve.bench.arms import LOSSLESS, make_arm
        from reprieve.bench.config import RunConfig
        from reprieve.bench.engine import Job

        arms = [make_arm(LOSSLESS, self._num_draft_tokens, target=self.pair.target)]
        settings = RunSettings(task=self.task_spec, split="train", limit=_NUM_TRIED, seed=self.seed)
        config = RunConfig.of(engine, arms, settings)
        problems = task.problems("train", _NUM_TRIED)
        jobs = [Job(arms[0].label, number, 0) for number in range(len(problems))]
        answers = list(engine.answer(config, task, arms, problems, jobs))
        if failed := next((answer.error for answer in answers if answer.error), None):
            raise ReprieveError(f"the pair cannot answer: {failed}")
        num_tokens = sum(answer.num_tokens for answer in answers) / len(answers)
        seconds = sum(answer.seconds for answer in answers) / len(answers)
        read = sum(answer.answer is not None for answer in answers)
        solved = sum(answer.correct for answer in answers)
        cut = sum(answer.finish_reason == "length" for answer in answers)
        screen.say(
            f"speed: {num_tokens / seconds:.0f} tokens a second with lossless speculation at K = "
            f"{self._num_draft_tokens}; answers of {num_tokens:.0f} tokens; of {len(answers)} {read} could be read, "
            f"{solved} were right"
        )
        if cut:
            screen.warn(
                f"ANSWERS CUT OFF: {cut} of {len(answers)} at {task.max_new_tokens} tokens: raise --max-new-tokens"
            )
        if not read:
            shown = answers[0].text.strip()[-300:]
            message = f"no answer could be read: check --grader and the prompt. The first response ends:\n{shown}"
            if not (self.look or self.unread):
                raise ReprieveError(f"{message}\n--unread goes on all the same")
            screen.warn(message)
        # A rollout from half of the answer for every second round; rollouts and a server's answers share forwards.
        rounds = sum(answer.num_rounds for answer in answers) / len(answers)
        mining = num_mined * seconds * (1 + rounds / 2) / 3 / self._workers()
        certifying = num_certified * seconds * (1 + _WALKED + 2) / self._workers()
        if not self.answering.local:
            mining, certifying = mining / _SHARED, certifying / _SHARED
        screen.say(
            f"plan: mine {num_mined} problems (about {_minutes(mining)}), train a head, certify a loss below "
            f"{100 * self.max_drop:g} points on {num_certified} problems and confirm it on as many others (about "
            f"{_minutes(certifying)}), compare on {min(_COMPARED, num_certified)}, write the report. "
            f"Everything goes to {self.out}"
        )
        return num_tokens

    def _workers(self) -> int:
        if self.num_workers is not None or not self.answering.local:
            return self.num_workers or 1
        import torch

        on_gpu = torch.cuda.is_available() if self.pair.device is None else self.pair.device != "cpu"
        return 1 if on_gpu else min(os.cpu_count() or 1, 4)

    def _certificate(self) -> Certificate:
        from reprieve.heads.certificates import Certificate

        return Certificate.load(self._certificate_path())

    def _certificate_path(self) -> Path:
        return self.out / "certificates" / f"judge-net_drop-{self.max_drop:g}.json"

    def _tell_how_to_serve(self, rule: str, certificate: Certificate | None) -> None:
        """Write the policy that servers take: at the certified threshold, or strict where nothing was certified."""
        policy, head = self.out / "policy.json", self.out / "head"
        about = {"rule": rule.replace(f"path={head}", f"path={head.resolve()}")}
        if certificate is None:
            about["default"] = "strict"
        else:
            about |= {"certificate": str(self._certificate_path().resolve()), "default": "certified"}
        replace_file(policy, json.dumps(about, indent=2) + "\n")
        screen.say(f"\nreport: {self.out / 'report.html'}   policy: {policy}")
        if certificate is None:
            screen.warn(
                "no certificate: the policy decodes losslessly unless a request asks for a threshold. For one, run in "
                "another folder (--out) with more problems (--certify-limit), a weaker promise (--max-drop) or more "
                "labels (--mine-limit)"
            )
        else:
            screen.say(certificate.statement)
        if self.answering.local:
            models = {"--target": self.pair.target, "--draft": self.pair.draft, "--dtype": self.pair.dtype}
            given = [part for flag, value in models.items() if value is not None for part in (flag, value)]
            k = ["--num-draft-tokens", str(self._num_draft_tokens)]
            screen.say(f"serve it: {shlex.join(['reprieve', 'serve', *given, '--rule', str(policy), *k])}")
            screen.say("for vLLM, certify on vLLM: the same command with --engine vllm and another --out")
        elif certificate is not None:
            screen.say(f"serve it: {self._vllm_command(certificate, policy)}")

    def _vllm_command(self, certificate: Certificate, policy: Path) -> str:
        """vLLM as it was measured."""
        from reprieve.backends.deploying import PAIR, Slot, VllmDeployer
        from reprieve.backends.settings import VllmSettings

        settings = self.answering.servers
        assert isinstance(settings, VllmSettings)
        made = certificate.conditions
        deployer = VllmDeployer(settings, self.pair, made.dtype)
        assert isinstance(made.num_draft_tokens, int)  # servers have no other
        deployment = deployer.deployment(Slot(PAIR, made.num_draft_tokens, made.drafter))
        command = shlex.join(["vllm", "serve", deployment.model, *deployment.flags(settings, policy.resolve())])
        return f"VLLM_USE_V2_MODEL_RUNNER={int(settings.runner == 'v2')} {command}" if settings.runner else command


def _about(engine: Engine) -> str:
    """Both models in a few words, and the memory that they take where they are loaded here."""
    from reprieve.backends.local import LocalEngine

    identity = engine.facts.identity
    if not isinstance(engine, LocalEngine):
        facts = engine.facts
        version = " ".join(filter(None, (facts.engine, facts.engine_version, facts.runner)))
        return f"{identity.target} and {identity.draft}, {facts.dtype} on {version}"
    pair = engine.pair
    models = [model for model in (pair.target, pair.draft) if model is not None]
    sizes = [sum(part.numel() for part in model.parameters()) for model in models]
    memory = sum(part.numel() * part.element_size() for model in models for part in model.parameters())
    words = [f"{size / 1e9:.2f} B" if size > 1e8 else f"{size / 1e6:.1f} M" for size in sizes]
    return (
        f"{identity.target} and {identity.draft} ({' and '.join(words)} parameters), {engine.facts.dtype} on "
        f"{pair.device}, {memory / 2**30:.2f} GiB of weights, one tokenizer of {len(pair.tokenizer)} tokens"
    )


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
