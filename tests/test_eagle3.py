"""EAGLE-3: heads read from files, dynamic trees, the greedy target's own tokens, training, other layouts."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from reprieve.drafters import DRAFTERS, EagleDrafter, EagleSettings
from reprieve.drafters.pruning import Pruning
from reprieve.engine import Pair, SamplingParams, SpeculativeDecoder, load_pair
from reprieve.errors import PairError, ReprieveError, SpecError, UnsupportedModelError
from reprieve.models import CachedModel
from reprieve.models.cache import RollbackCache
from reprieve.models.eagle3 import default_layers, load_eagle3
from reprieve.models.eagle3_layouts import convert_safeailab
from reprieve.rules import parse_rule
from reprieve.tasks import load_task
from reprieve.training.own_text import OwnText, write_own_texts
from reprieve.training.settings import EagleTraining
from reprieve.types import ROOT

from .tiny import ARCHITECTURES, NumberTokenizer, random_eagle, tiny_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
BUNDLED = "reprieve/arithmetic-eagle3"


def make_decoder(target, head, *, rule="lossless", k=16, **shape):
    drafter = EagleDrafter(head, vocab_size=48, settings=EagleSettings(**shape))
    cached = CachedModel(target, hidden_layers=head.layers_read)
    return SpeculativeDecoder(cached, drafter, NumberTokenizer(), rule=parse_rule(rule), num_draft_tokens=k)


SHAPES = [
    dict(depth=1, top_k=3, total_tokens=3),
    dict(depth=4, top_k=1, total_tokens=4),
    dict(depth=5, top_k=4, total_tokens=20),
    dict(depth=3, top_k=48, total_tokens=60),
]


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_greedy_trees_give_the_targets_own_tokens(kind, shape):
    target = tiny_model(kind)
    head = random_eagle(target, draft_vocab_size=40)
    plain = SpeculativeDecoder(CachedModel(target), None, NumberTokenizer())
    params = SamplingParams(max_new_tokens=60)
    wanted = plain.generate(PROMPT, params).token_ids
    for pruning in ({}, {"prune": "entropy", "epsilon": 0.3}):
        made = make_decoder(target, head, **pruning, **shape).generate(PROMPT, params)
        assert made.token_ids == wanted
        assert (made.num_pruned > 0) == (bool(pruning) and shape["top_k"] > 1)


@pytest.mark.parametrize(
    "rule",
    ["top_k:k=3", "typical", "margin:delta=2", "fuzzy:threshold=0.5", "asd", "fly", "random:rate=0.5", "lenience"],
)
def test_every_kind_of_rule_decodes_trees(rule):
    target = tiny_model()
    decoder = make_decoder(target, random_eagle(target), rule=rule, depth=4, top_k=3, total_tokens=12)
    for temperature in (0.0, 1.0):
        made = decoder.generate(PROMPT, SamplingParams(max_new_tokens=40, temperature=temperature))
        assert len(made.tokens) == 40
        assert max(made.round_lengths) <= 5


def test_rounds_keep_within_depth_budget_and_k():
    target = tiny_model()
    head = random_eagle(target)
    for k, longest in ((2, 3), (16, 7)):
        made = make_decoder(target, head, rule="top_k:k=48", k=k, depth=6, top_k=1).generate(
            PROMPT, SamplingParams(max_new_tokens=23)
        )
        assert max(made.round_lengths) == longest and len(made.tokens) == 23
    assert len(make_decoder(target, head, depth=3).generate([5], SamplingParams(max_new_tokens=9)).tokens) == 9


def test_the_tree_holds_the_paths_of_largest_joint_probability():
    """Two levels with every child expanded: the tree is the best of all paths, found here by enumeration."""
    target = tiny_model(vocab_size=6)
    head = random_eagle(target)
    total = 11
    drafter = EagleDrafter(head, vocab_size=6, settings=EagleSettings(depth=2, top_k=6, total_tokens=total))
    cached = CachedModel(target, hidden_layers=head.layers_read)
    SpeculativeDecoder(cached, drafter, NumberTokenizer(6))
    with torch.inference_mode():
        prompt = [1, 2, 3, 4]
        prefill = cached.start(prompt[:-1])
        from reprieve.models.sampling import Sampler

        drafter.start(prompt, Sampler(SamplingParams(), torch.device("cpu")), prefill)
        block = drafter.propose(2)
        states = head.fuse(prefill.hidden)
        cache = RollbackCache()
        size = len(states)
        mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None]
        places = torch.arange(size)
        logits, hidden = head(torch.tensor(prompt[1:]), states, cache=cache, positions=places, mask=mask)
        first = logits[-1].log_softmax(-1)
        paths = {}
        for token in range(6):
            paths[(token,)] = float(first[token])
            cache.keep(size)
            after, _ = head(torch.tensor([token]), hidden[-1:], cache=cache, positions=torch.tensor([size]), mask=None)
            for child in range(6):
                paths[token, child] = float(first[token] + after[0].log_softmax(-1)[child])
    best = set(sorted(paths, key=paths.get, reverse=True)[:total])
    drafted = []
    for node, parent in enumerate(block.parents):
        above = () if parent == ROOT else drafted[parent]
        drafted.append((*above, int(block.token_ids[node])))
    assert set(drafted) == best
    assert block.draft_logits[0].log_softmax(-1).allclose(first, atol=1e-5)


def test_two_children_of_one_parent_are_never_the_same_token():
    target = tiny_model()
    decoder = make_decoder(target, random_eagle(target), depth=4, top_k=5, total_tokens=30)
    made = decoder.generate(PROMPT, SamplingParams(max_new_tokens=40), trace=True)
    for trace in made.trace:
        pairs = list(zip(trace.parents, trace.drafted_ids, strict=True))
        assert len(set(pairs)) == len(pairs)


def test_a_target_that_hands_out_no_states_is_refused():
    target = tiny_model()
    with pytest.raises(UnsupportedModelError, match="eagle3 drafter needs the target's hidden states of layer 0"):
        SpeculativeDecoder(CachedModel(target), EagleDrafter(random_eagle(target), vocab_size=48), NumberTokenizer())


def test_block_verification_of_trees_is_refused_at_once():
    target = tiny_model()
    with pytest.raises(SpecError, match="needs chains, and the eagle3 drafter draws trees"):
        make_decoder(target, random_eagle(target), rule="lossless:verification=block")
    chain = make_decoder(target, random_eagle(target), rule="lossless:verification=block", top_k=1)
    assert len(chain.generate(PROMPT, SamplingParams(max_new_tokens=9, temperature=1.0)).tokens) == 9


def test_specifications_are_checked_and_name_what_is_known():
    parsed = DRAFTERS.make("eagle3:top_k=4,prune=depth,keep=0.5")
    assert parsed == EagleSettings(top_k=4, prune="depth", keep=0.5) and parsed.pruning == Pruning("depth", keep=0.5)
    for spec, told in {
        "eagle3:width=3": "takes alpha, budget, depth",
        "eagle3:depth=0": "depth must be in [1, 512], got 0",
        "eagle3:epsilon=0.1": "epsilon goes with prune=",
        "eagle3:prune=random": "prune must be one of entropy, depth, depth_exp, path_prob, got 'random'",
        "eagle3:prune=entropy,epsilon=1": "epsilon must be in [0, 1), got 1.0",
        "eagle3:depth=deep": "depth must be a whole number, got 'deep'",
        "eagle3:top_k=1.5": "top_k must be a whole number, got '1.5'",
        "eagle3:prune=entropy,keep=0.5": "prune=entropy takes epsilon, budget, entropy_weight, leaf, not keep",
        "eagle3:prune=depth,alpha=inf": "alpha must be in [-1e+06, 1e+06], got inf",
        "eagle3:path=": "path must name a folder or a hub id",
        "ngram:max_ngram=0": "min_ngram must be in [1, max_ngram = 0], got 1",
        "draft:k=3": "it takes none",
        "oracle": "drafter must be one of draft, eagle3, ngram",
    }.items():
        with pytest.raises(SpecError) as caught:
            DRAFTERS.make(spec)
        assert told in str(caught.value)


# ---- the bundled head ----


@pytest.fixture(scope="module")
def pair():
    return load_pair(dtype="float32")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_bundled_head_drafts_for_the_bundled_target(pair, temperature):
    problems = load_task("arithmetic").problems("test", 6)
    plain = SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    drafter = DRAFTERS.make("eagle3").build(pair, parse_rule("lossless"))
    decoder = SpeculativeDecoder(pair.cached_target(drafter.target_layers), drafter, pair.tokenizer)
    rounds = tokens = 0
    for number, problem in enumerate(problems):
        params = SamplingParams(temperature=temperature, seed=number)
        made = decoder.generate(problem.prompt, params)
        tokens, rounds = tokens + len(made.tokens), rounds + made.num_rounds
        if not temperature:
            assert made.token_ids == plain.generate(problem.prompt, params).token_ids
    assert tokens / rounds > 4.5, "six tokens deep and a bonus: seven at most"


def test_our_forward_equals_the_speculators_models(pair):
    """Step by step of its training-time unrolling, from the same file."""
    pytest.importorskip("speculators")
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    from reprieve.heads.files import find_head

    folder = find_head(BUNDLED)
    document = json.loads((folder / "config.json").read_text())
    config = Eagle3SpeculatorConfig(**{k: v for k, v in document.items() if k != "transformers_version"})
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = Eagle3DraftModel(config)
    missing = theirs.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
    assert not missing.unexpected_keys and all(name.startswith("verifier") for name in missing.missing_keys)
    ours = pair.eagle_head(BUNDLED)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 714, (1, 12), generator=generator)
    hidden = torch.randn(1, 12, 256 * 3, generator=generator)
    seen = []
    hook = theirs.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0].detach()))
    with torch.no_grad():
        theirs.float()(hidden_states=hidden, input_ids=ids, document_ids=torch.zeros_like(ids), ttt_steps=3)
    hook.remove()
    with torch.inference_mode():
        states = ours.fuse(dict(zip(ours.layers_read, hidden[0].split(256, dim=-1), strict=True)))
        for place in (3, 8):
            cache, size = RollbackCache(), place + 1
            mask = torch.full((size, size), torch.finfo(torch.float32).min).triu(1)[None, None]
            logits, own = ours(ids[0, :size], states[:size], cache=cache, positions=torch.arange(size), mask=mask)
            own = own[-1:]
            for step in range(3):
                torch.testing.assert_close(logits[-1], seen[step][place], atol=2e-4, rtol=1e-3)
                token = ids[0, place + 1 + step][None]
                logits, own = ours(token, own, cache=cache, positions=torch.tensor([size + step]), mask=None)


def test_a_head_for_another_target_is_refused(pair, tmp_path):
    other = tiny_model()
    with pytest.raises(PairError, match="must have shape"):
        load_eagle3(BUNDLED, other)
    with pytest.raises(ReprieveError, match="neither a folder nor a hub id"):
        load_eagle3("./nowhere", other)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ReprieveError, match="speculators format"):
        load_eagle3(tmp_path, other)
    head = pair.eagle_head(BUNDLED)
    assert int(head.target_ids.max()) < 714 and len(set(head.target_ids.tolist())) == head.config.draft_vocab_size


def broken(tmp_path, change, name):
    from reprieve.heads.files import find_head

    folder = tmp_path / name
    folder.mkdir()
    document = json.loads((find_head(BUNDLED) / "config.json").read_text())
    tensors = load_file(find_head(BUNDLED) / "model.safetensors")
    change(document, tensors)
    (folder / "config.json").write_text(json.dumps(document))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda config, tensors: tensors.pop("fc.weight"), "lacks fc.weight"),
        (lambda config, tensors: tensors.update(d2t=tensors["d2t"] + 900), "d2t names tokens"),
        (lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids=[2, 4, 99]), "reads layers"),
        (lambda config, tensors: config.pop("draft_vocab_size"), "draft_vocab_size"),
        (lambda config, tensors: config.update(draft_vocab_size=-3), "draft_vocab_size must be 1 or more, got -3"),
        (lambda config, tensors: config.update(eagle_aux_hidden_state_layer_ids="abc"), "cannot be read"),
        (lambda config, tensors: config["transformer_layer_config"].update(hidden_size="x"), "cannot be read"),
        (lambda config, tensors: config["transformer_layer_config"].update(hidden_act="bogus"), "cannot be read"),
        (lambda config, tensors: config.update(transformer_layer_config=[1]), "cannot be read"),
        (lambda config, tensors: config["transformer_layer_config"].update(model_type="bert"), "must be one of llama"),
    ],
)
def test_a_damaged_head_says_what_is_wrong(pair, tmp_path, change, told):
    with pytest.raises(ReprieveError, match=told):
        load_eagle3(broken(tmp_path, change, "head"), pair.target)


# ---- SafeAILab's layout ----


def safeailab(tmp_path):
    """The bundled head as SafeAILab would have saved it."""
    from reprieve.heads.files import find_head

    folder = tmp_path / "theirs"
    folder.mkdir()
    tensors = load_file(find_head(BUNDLED) / "model.safetensors")
    names = {name: name.replace("layers.0.", "midlayer.") for name in tensors}
    save_file(
        {names[name]: tensor for name, tensor in tensors.items() if name != "embed_tokens.weight"},
        folder / "model.safetensors",
    )
    layer = json.loads((find_head(BUNDLED) / "config.json").read_text())["transformer_layer_config"]
    (folder / "config.json").write_text(
        json.dumps({**layer, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 256})
    )
    return folder


def test_safeailabs_layout_converts_and_drafts_alike(pair, tmp_path):
    out = tmp_path / "ours"
    convert_safeailab(
        safeailab(tmp_path), out, target_name="reprieve/arithmetic-pair", layers=(2, 4, 7), norm_before_residual=True
    )
    theirs, ours = load_eagle3(out, pair.target), pair.eagle_head(BUNDLED)
    for name, tensor in ours.state_dict().items():
        # The bundled file holds the embedding in half precision; theirs holds none, and takes the target's.
        torch.testing.assert_close(theirs.state_dict()[name], tensor, atol=1e-3, rtol=1e-3)
    with pytest.raises(ReprieveError, match="already"):
        convert_safeailab(out, tmp_path / "again", target_name="x")


def test_conversion_refuses_what_is_no_head_and_folders_that_hold_something_else(tmp_path):
    source = safeailab(tmp_path)
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "config.json").write_text('{"kind": "judge"}')
    with pytest.raises(ReprieveError, match="holds something else"):
        convert_safeailab(source, taken, target_name="x")
    assert (taken / "config.json").read_text() == '{"kind": "judge"}'
    (tmp_path / "file").write_text("")
    with pytest.raises(ReprieveError, match="cannot be written"):
        convert_safeailab(source, tmp_path / "file" / "below", target_name="x")
    save_file({"midlayer.x": torch.zeros(1)}, source / "model.safetensors")
    with pytest.raises(ReprieveError, match=r"lacks fc\.weight"):
        convert_safeailab(source, tmp_path / "out", target_name="x")


def test_pickles_are_never_read(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ReprieveError, match="can run code and is never read"):
        convert_safeailab(tmp_path, tmp_path / "out", target_name="x")


# ---- training ----


def tiny_pair():
    return Pair(tiny_model(), None, NumberTokenizer(), "tiny/target", None)


def texts_of(pair, num=12, shift=0):
    plain = SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    params = SamplingParams(max_new_tokens=20, temperature=1.0)
    prompts = [[i, (7 * i + shift) % 48, 3, 5] for i in range(num)]
    return [
        OwnText(prompt, plain.generate(prompt, dataclasses.replace(params, seed=i)).token_ids)
        for i, prompt in enumerate(prompts)
    ]


def test_training_resumes_to_the_same_head_and_learns(tmp_path):
    pytest.importorskip("speculators")
    from reprieve.training import eagle3 as module

    pair = tiny_pair()
    settings = EagleTraining(
        layers=(0, 1, 2), draft_vocab_size=48, num_steps=2, num_passes=6, tokens_per_update=96, warmup_updates=2,
        learning_rate=5e-3, held_out=0.1,
    )  # fmt: skip
    texts = texts_of(pair)
    reached = module.train_eagle3(pair, texts, tmp_path / "whole", settings=settings)
    assert len(reached["accuracy"]) == 2 and reached["num_held_out"] == 1
    losses = [json.loads(line)["loss"] for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])

    def stop(done, total):
        if done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        module.train_eagle3(pair, texts, tmp_path / "cut", settings=settings, progress=stop)
    module.train_eagle3(pair, texts, tmp_path / "cut", settings=settings)
    whole, cut = (load_file(tmp_path / name / "head" / "model.safetensors") for name in ("whole", "cut"))
    for name, tensor in whole.items():
        assert torch.equal(tensor, cut[name]), name
    head = load_eagle3(tmp_path / "whole" / "head", pair.target)
    made = make_decoder(pair.target, head).generate(PROMPT, SamplingParams(max_new_tokens=30))
    plain = SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    assert made.token_ids == plain.generate(PROMPT, SamplingParams(max_new_tokens=30)).token_ids
    for changed in (dict(num_passes=7), dict(held_out=0.3)):
        with pytest.raises(ReprieveError, match="another recipe"):
            module.train_eagle3(pair, texts, tmp_path / "cut", settings=dataclasses.replace(settings, **changed))
    with pytest.raises(ReprieveError, match="another recipe"):  # as many texts, but others: another vocabulary
        module.train_eagle3(pair, texts_of(pair, shift=5), tmp_path / "cut", settings=settings)
    checkpoint = tmp_path / "cut" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    with pytest.raises(ReprieveError, match="cannot be read as a checkpoint"):
        module.train_eagle3(pair, texts, tmp_path / "cut", settings=settings)
    stranger = Pair(tiny_model(seed=9), None, NumberTokenizer(), "tiny/other", None)
    with pytest.raises(PairError, match="was made for target 'tiny/target'"):
        stranger.eagle_head(str(tmp_path / "whole" / "head"))


def test_the_vocabulary_is_the_answers_most_frequent_tokens():
    from reprieve.training.eagle3 import choose_vocabulary

    texts = [OwnText([9, 9, 9], [4, 4, 4, 7, 7, 2]), OwnText([9], [4, 11])]
    t2d, d2t = choose_vocabulary(texts, size=3, vocab_size=12)
    ids = (torch.arange(3) + d2t).tolist()
    assert ids == t2d.nonzero().squeeze(-1).tolist() and {4, 7} <= set(ids)
    t2d, d2t = choose_vocabulary(texts, size=12, vocab_size=12)
    assert (torch.arange(12) + d2t).tolist() == list(range(12))
    with pytest.raises(SpecError, match="num_steps must be 1 or more"):
        EagleTraining(num_steps=0)


def test_own_texts_are_the_targets_and_survive_a_kill(pair, tmp_path):
    problems = load_task("arithmetic").problems("train", 6)
    params = SamplingParams(max_new_tokens=24, temperature=1.0, seed=3)
    path = tmp_path / "own.jsonl"
    whole = write_own_texts(path, pair, problems, params=params, mixed=True)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:3]) + "\n" + lines[3][:20])
    assert write_own_texts(path, pair, problems, params=params, mixed=True) == whole
    plain = SpeculativeDecoder(pair.cached_target(), None, pair.tokenizer)
    for place in (0, 2, 4):  # every second one is greedy
        made = plain.generate(problems[place].prompt, SamplingParams(max_new_tokens=24))
        assert whole[place].answer_ids == made.token_ids
    edited = [dataclasses.replace(problems[0], prompt=problems[1].prompt), *problems[1:]]
    again = write_own_texts(path, pair, edited, params=params, mixed=True)
    assert again[0].prompt_ids == whole[1].prompt_ids and again[1:] == whole[1:], "an edited prompt is answered anew"
    for damaged in (
        b'{"other": 1}\n',
        b"\xff\xfe\n",
        b'{"problem_id": "a", "prompt_ids": [9999], "answer_ids": [1]}\n',
    ):
        path.write_bytes(damaged)
        with pytest.raises(ReprieveError, match="cannot be read as a target's answers"):
            write_own_texts(path, pair, problems, params=params)


def test_published_layers():
    assert default_layers(32) == (2, 16, 29)


# ---- pruning ----


def random_tree(seed, num=40):
    generator = torch.Generator().manual_seed(seed)
    parents, log_probs = [], []
    for node in range(num):
        parent = int(torch.randint(-1, node, (1,), generator=generator)) if node else ROOT
        step = -float(torch.rand(1, generator=generator)) * 2
        parents.append(parent)
        log_probs.append(step + (0.0 if parent == ROOT else log_probs[parent]))
    return parents, log_probs


def depths_of(parents):
    depths = []
    for parent in parents:
        depths.append(0 if parent == ROOT else depths[parent] + 1)
    return depths


@pytest.mark.parametrize("strategy", ["entropy", "depth", "depth_exp", "path_prob"])
@pytest.mark.parametrize("seed", range(5))
def test_pruning_keeps_prefixes(strategy, seed):
    parents, log_probs = random_tree(seed)
    kept = Pruning(strategy, epsilon=0.3, keep=0.6, leaf=0.02).kept(parents, log_probs, 0.4)
    assert 0 < len(kept) < len(parents) and kept == sorted(set(kept))
    assert all(parents[node] == ROOT or parents[node] in kept for node in kept)


@pytest.mark.parametrize("seed", range(5))
def test_entropy_pruning_covers_each_depths_mass_and_leaves_no_parent_childless(seed):
    parents, log_probs = random_tree(seed)
    depths = depths_of(parents)
    for pruning, share in ((Pruning(epsilon=0.2), 0.2), (Pruning(budget=0.5), 0.5 / (max(depths) + 1))):
        kept = set(pruning.kept(parents, log_probs, 0.4))
        # Nodes go only for their own depth's threshold, or because their parent went.
        for depth in range(max(depths) + 1):
            nodes = [node for node in range(len(parents)) if depths[node] == depth]
            mass = sum(math.exp(log_probs[node]) for node in nodes)
            ranked = sorted(nodes, key=lambda node: -log_probs[node])
            needed = next(
                size for size in range(1, len(ranked) + 1)
                if sum(math.exp(log_probs[node]) for node in ranked[:size]) >= (1 - share) * mass * (1 - 1e-9)
            )  # fmt: skip
            reachable = [n for n in ranked[:needed] if parents[n] == ROOT or parents[n] in kept]
            assert set(reachable) <= kept
        parents_with_children = {parent for parent in parents if parent != ROOT}
        for node in kept & parents_with_children:
            assert any(parents[child] == node for child in kept)


def test_entropy_moves_leaves_and_no_depths_threshold():
    parents, log_probs = random_tree(3)
    calm, unsure = (Pruning(epsilon=0.2).kept(parents, log_probs, entropy) for entropy in (0.0, 1.0))
    assert calm == unsure, "Eq. 1 scales a whole depth: Eq. 3 cannot see it"
    calm, unsure = (Pruning(epsilon=0.2, leaf=0.05).kept(parents, log_probs, entropy) for entropy in (0.0, 1.0))
    assert len(unsure) < len(calm)


def test_a_hand_made_tree():
    # Two roots of mass 0.9 and 0.05; under the first 0.6, 0.2 and 0.02; under the 0.2 a lone child.
    parents = [ROOT, ROOT, 0, 0, 0, 3]
    mass = [0.9, 0.05, 0.6, 0.2, 0.02, 0.1]
    logs = [math.log(value) for value in mass]
    assert Pruning(epsilon=0.1).kept(parents, logs, 0.0) == [0, 2, 3, 5]
    assert Pruning(epsilon=0.3).kept(parents, logs, 0.0) == [0, 2], "0.6 of 0.82 covers 70% of its depth"
    assert Pruning(epsilon=0.1, leaf=0.3).kept(parents, logs, 0.0) == [0, 2, 3, 5], "a parent keeps its best child"
    assert Pruning("path_prob", keep=0.5).kept(parents, logs, 0.0) == [0, 2, 3]
    assert Pruning("depth", keep=0.5, alpha=1.0).kept(parents, logs, 0.0) == [], (
        "its favourites have lost their parents"
    )
    assert Pruning().kept([], [], 0.0) == []


def test_an_emptied_tree_is_a_plain_step():
    target = tiny_model()
    decoder = make_decoder(target, random_eagle(target), prune="depth", keep=0.1, alpha=9.0, depth=4, top_k=3)
    made = decoder.generate(PROMPT, SamplingParams(max_new_tokens=12))
    assert len(made.tokens) == 12 and set(itertools.chain(made.round_lengths)) == {1}
