"""From labels to heads on the command line."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings

import pytest

from reprieve.cli.main import main
from reprieve.drafters.eagle3 import EagleSettings
from reprieve.engine import load_pair
from reprieve.mining.store import LabelStore
from reprieve.tasks import load_task
from tests.kit.pairs import SMALL

A, B, C, AB, BC, SPACE = range(1, 7)
SKIPPED = ("--skip", "target_only", "--skip", "draft_only")


@pytest.mark.slow
def test_mine_show_train_and_decode_end_to_end(tmp_path, capsys):
    store, head = tmp_path / "labels", tmp_path / "head"
    mine = ["mine", "autojudge", *SMALL, "--offset", "386", "--limit", "6", "--in-flight", "6", "--out", str(store)]
    assert main(mine) == 0
    assert "6 problems (0 without an answer)" in capsys.readouterr().out
    assert main(mine) == 0
    assert "mined now: 0, there before: 6" in capsys.readouterr().out
    assert main([*mine, "--variant", "naive"]) == 1
    assert "made with variant = 'search', this run has 'naive'" in capsys.readouterr().err
    assert main(["labels", "show", str(store), "--problem", "train-0-388"]) == 0
    assert "train-0-388 (mined)" in capsys.readouterr().out
    assert main(["labels", "show", str(store), "--problem", "nope"]) == 2
    assert main(["labels", "stats", str(store)]) == 0
    assert "class of the target's token" in capsys.readouterr().out
    assert main(["train", "judge", *SMALL, "--labels", str(store), "--held-out", "0.5", "--out", str(head)]) == 0
    trained = capsys.readouterr().out
    assert re.search(r"held-out ROC AUC: 0\.\d+", trained)
    assert f"reprieve train length --rule judge:path={head} --out {head}-length" in trained
    bench = ["bench", *SMALL, *SKIPPED, "--arm", f"judge:path={head}", "--limit", "2", "--out", str(tmp_path / "bench")]
    assert main(bench) == 0
    arms = {arm["rule"]: arm for arm in json.loads((tmp_path / "bench" / "results.json").read_text())["arms"]}
    assert arms["judge"]["num_rescued"] > 0
    assert arms["judge"]["tokens_per_round"] > arms["lossless"]["tokens_per_round"]
    lists = ["bench", *SMALL, *SKIPPED, "--arm", f"judge:path={head},threshold=0,0.5", "--limit", "1"]
    assert main([*lists, "--out", str(tmp_path / "s")]) == 0
    assert main(["bench", *SMALL, "--arm", "judge:path=/nowhere", "--out", str(tmp_path / "b2")]) == 1
    assert "neither a folder nor a hub id" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (["mine", "autojudge", "--max-new-tokens", "0"], "max_new_tokens must be in [1, 2147483647], got 0"),
        (["mine", "pivot", "--rollouts", "0"], "num_rollouts must be in [1, 4096], got 0"),
        (["mine", "autojudge", "--task", "prompts:path={prompts}", "--split", "all"], "no reference answers"),
        (["mine", "pivot", "--task", "prompts:path={prompts}", "--split", "all"], "no reference answers"),
        (["mine", "autojudge", "--task", "gsm8k:path={gsm}", "--offset", "9"], "offset must be below"),
        (
            ["mine", "autojudge", "--task", "jsonl:path={gsm}", "--split", "all", "--offset", "9"],
            "offset must be below the 1 problems in split 'all'",
        ),
        (
            ["mine", "autojudge", "--judge", "openai:model=m,temperature=hot", "--limit", "1"],
            "must be a number, got 'hot'",
        ),
        (["train", "judge", "--grid", "nan"], "grid must hold finite values of C above 0"),
        (["train", "judge", "--held-out", "1"], "held_out must be in (0, 0.9], got 1.0"),
        (["train", "pivot", "--epochs", "-1"], "num_epochs must be 1 or more, got -1"),
    ],
)
def test_bad_options_are_refused_at_once(command, says, tmp_path, capsys):
    (tmp_path / "p.jsonl").write_text('{"prompt": "Say hi"}\n')
    (tmp_path / "g.jsonl").write_text('{"question": "1+1?", "answer": "2\\n#### 2"}\n')
    given = [part.format(prompts=tmp_path / "p.jsonl", gsm=tmp_path / "g.jsonl") for part in command]
    assert main([*given, "--out", str(tmp_path / "out")]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_pivot_end_to_end(tmp_path, capsys):
    store, head = tmp_path / "labels", tmp_path / "head"
    mined = tmp_path / "mined"
    mine = ["mine", "pivot", *SMALL, "--limit", "4", "--rollouts", "2", "--in-flight", "4", "--max-new-tokens", "24"]
    assert main([*mine, "--out", str(mined)]) == 0
    assert any(item.important is not None for problem in LabelStore(mined).problems() for item in problem.mismatches)
    copy = LabelStore(store, LabelStore(mined).manifest)  # answers this short are never right, so name some pivots
    for problem in LabelStore(mined).problems():
        named = [dataclasses.replace(item, important=n % 2 == 1) for n, item in enumerate(problem.mismatches)]
        copy.append(dataclasses.replace(problem, mismatches=tuple(named)))
    train = ["train", "pivot", *SMALL, "--labels", str(store), "--epochs", "3", "--held-out", "0.5"]
    assert main([*train, "--out", str(head)]) == 0
    sampling = ["--temperature", "0.6", "--top-p", "0.95", "--top-k", "20"]
    bench = ["bench", *SMALL, "--arm", f"pivot:path={head},threshold=0.9", "--limit", "1", "--max-new-tokens", "40"]
    bench += sampling
    assert main([*bench, "--out", str(tmp_path / "b")]) == 0
    assert main(["train", "pivot", *SMALL, "--labels", str(tmp_path / "none")]) == 1
    assert "is not a label store" in capsys.readouterr().err


@pytest.mark.slow
def test_state_arbiter_end_to_end(tmp_path, capsys):
    mined, store, head = tmp_path / "mined", tmp_path / "traces", tmp_path / "head"
    mine = ["mine", "arbitration", *SMALL, "--limit", "4", "--num-draft-tokens", "8", "--max-mismatches", "1"]
    assert main([*mine, "--max-new-tokens", "32", "--out", str(mined)]) == 0
    # The bundled draft is rarely better, so make it better in every third mismatch and worse in another third.
    copy = LabelStore(store, LabelStore(mined).manifest)
    for problem in LabelStore(mined).problems():
        utilities = enumerate(problem.mismatches)
        worth = [
            dataclasses.replace(item, base_utility=float(n % 3 != 1), candidate_utility=float(n % 3 != 2))
            for n, item in utilities
        ]
        copy.append(dataclasses.replace(problem, mismatches=tuple(worth)))
    train = ["train", "state-arbiter", *SMALL, "--labels", str(store), "--grid", "0.01", "--held-out", "0.4"]
    assert main([*train, "--out", str(head)]) == 0
    said = capsys.readouterr().out
    assert "the draft's side worse: in" in said and "the draft's side better: in" in said
    bench = ["bench", *SMALL, "--arm", f"state_arbiter:path={head}", "--limit", "1", "--max-new-tokens", "40"]
    assert main([*bench, "--out", str(tmp_path / "b")]) == 0
    judged = tmp_path / "judged"
    bare = LabelStore(judged, LabelStore(mined).manifest | {"miner": "autojudge"})
    for problem in LabelStore(mined).problems():
        plain = [dataclasses.replace(item, base_utility=None, candidate_utility=None) for item in problem.mismatches]
        bare.append(dataclasses.replace(problem, mismatches=tuple(plain)))
    assert main(["train", "state-arbiter", *SMALL, "--labels", str(judged), "--out", str(tmp_path / "no")]) == 2
    assert "labels must say what both sides of a mismatch are worth" in capsys.readouterr().err


@pytest.mark.slow
def test_annotated_labels_train_a_head(tmp_path, capsys):
    rows = [
        {"prompt": f"Question: {n}?\nAnswer:", "response": f" 5+{n}={n}. The final answer is {n}.", "wrong": [[5, 6]]}
        for n in range(1, 9)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    store = tmp_path / "store"
    (tmp_path / "none.jsonl").write_text("\n")
    assert main(["labels", "import", str(tmp_path / "none.jsonl"), *SMALL, "--out", str(store)]) == 1
    assert "holds no annotations" in capsys.readouterr().err and not store.exists()
    assert main(["labels", "import", str(path), *SMALL, "--out", str(store)]) == 0
    train = ["train", "judge", *SMALL, "--labels", str(store), "--held-out", "0.3"]
    assert main([*train, "--out", str(tmp_path / "h")]) == 0
    assert f"--out {tmp_path / 'h'}-length" in capsys.readouterr().out
    manifest = json.loads((store / "manifest.json").read_text())
    pair = load_pair(manifest["target"])
    weights = pair.eagle_head(EagleSettings().source(pair.target_name)).fingerprint
    for name, made_by in (("e", weights), ("other", "0" * 16)):
        changed = manifest | {"drafter": "eagle3", "drafter_weights": made_by}
        (store / "manifest.json").write_text(json.dumps(changed))
        assert main([*train, "--out", str(tmp_path / name)]) == 0
        assert "train length" not in capsys.readouterr().out, "a length head reads a draft model"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pair.decoder(f"judge:path={tmp_path / 'h'}")
        pair.decoder(f"judge:path={tmp_path / 'e'}", drafter="eagle3")
    for name, drafter, other in (("h", "eagle3", "draft"), ("e", "draft", "eagle3")):
        with pytest.warns(UserWarning, match=f"trained on tokens of drafter {other} and judges those of {drafter}"):
            pair.decoder(f"judge:path={tmp_path / name}", drafter=drafter)
    with pytest.warns(UserWarning, match="trained on tokens of drafter eagle3 and judges another head's"):
        pair.decoder(f"judge:path={tmp_path / 'other'}", drafter="eagle3")


@pytest.mark.slow
def test_two_workers_give_the_same_labels_as_one(tmp_path, capsys):
    mine = ["mine", "autojudge", *SMALL, "--limit", "4", "--in-flight", "2", "--max-new-tokens", "64"]
    assert main([*mine, "--workers", "2", "--out", str(tmp_path / "two")]) == 0
    assert "mined now: 4" in capsys.readouterr().out
    assert "workers: 2" in (tmp_path / "two" / "config.yaml").read_text()
    assert main([*mine, "--workers", "2", "--out", str(tmp_path / "two")]) == 0
    assert "mined now: 0, there before: 4" in capsys.readouterr().out
    assert main([*mine, "--out", str(tmp_path / "one")]) == 0
    ours, theirs = (LabelStore(tmp_path / name).problems() for name in ("one", "two"))
    assert [dataclasses.replace(p, seconds=0) for p in ours] == [dataclasses.replace(p, seconds=0) for p in theirs]


def test_mining_needs_at_least_one_worker(tmp_path, capsys):
    assert main(["mine", "autojudge", "--workers", "0", "--out", str(tmp_path / "x")]) == 2
    assert "workers must be in [1, 1024], got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_max_new_tokens_is_reduced_to_fit_the_pair(tmp_path):
    rows = [{"question": f"What is {number} + {number}?", "answer": str(2 * number)} for number in range(30)]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = f"jsonl:path={tmp_path / 'q.jsonl'},grader=number"  # 1,024 tokens per answer, and the pair reads 512
    with pytest.warns(UserWarning, match="instead of 1024: the models read 512 tokens"):
        assert main(["mine", "autojudge", *SMALL, "--task", task, "--limit", "1", "--out", str(tmp_path / "l")]) == 0
    lts = ["train", "lts", *SMALL, "--task", task, "--out", str(tmp_path / "lts")]
    with pytest.warns(UserWarning, match="instead of 1024: the models read 512 tokens"):
        assert main([*lts, "--limit", "2"]) == 0


def test_an_empty_split_is_named_with_the_splits_that_have_problems(tmp_path, capsys):
    (tmp_path / "q.jsonl").write_text('{"question": "What is 1 + 1?", "answer": "2"}\n')
    task = f"jsonl:path={tmp_path / 'q.jsonl'},grader=number"
    sizes = {split: len(load_task(task).problems(split, 9)) for split in ("train", "validation", "test")}
    empty = next(split for split, size in sizes.items() if not size)
    for command in (["bench"], ["train", "lts"], ["mine", "autojudge"]):
        given = [*SMALL, "--task", task, "--split", empty, "--out", str(tmp_path / "o")]
        assert main([*command, *given]) == 2
        assert f"split '{empty}' of task jsonl holds no problems; there are 1 in " in capsys.readouterr().err
