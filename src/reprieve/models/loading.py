"""Load a target and a draft, and check that they belong together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig, PretrainedConfig, PreTrainedModel
from transformers.utils import logging

from reprieve.bundles import BUNDLES, source_of
from reprieve.errors import PairError, ReprieveError, SpecError, UnsupportedModelError, import_extra
from reprieve.identity import PairIdentity, digest, tokenizer_fingerprint
from reprieve.models.cached_model import (
    CachedModel,
    HiddenLayers,
    StepCosts,
    execution_device,
    max_positions,
    measure_forwards,
)
from reprieve.models.eagle3 import EagleHead, load_eagle3
from reprieve.models.int8 import INT8, dtype_name, quantise

# Weights of whole checkpoints that text models do not use: other modalities, further heads, computed positions.
_SPARE = re.compile(r"(^|\.)(vision|visual|audio|multi_modal|mm_|mtp|talker|code2wav|.*rotary_emb)")
NUM_VALUES = 64  # values per tensor in a fingerprint
DTYPES = ("auto", "float32", "bfloat16", "float16", INT8)
GGUF = ".gguf"


@dataclass(frozen=True)
class ModelPair:
    """Loaded target, draft and shared tokenizer. `reprieve.load_pair` returns a subclass that also makes decoders.

    Each decoder gets new `CachedModel`s; the models are shared.
    """

    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: Any
    target_name: str
    draft_name: str | None
    _eagle_heads: dict[str, EagleHead] = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self) -> None:
        if any(getattr(model.config, "quantization_config", None) for model in self._models):
            _ = self.identity  # now, because the first forward of compressed-tensors replaces the weights

    @property
    def vocab_size(self) -> int:
        """Columns of the target's logits; the draft's are matched to it."""
        return int(self.target.get_output_embeddings().weight.shape[0])

    @property
    def _models(self) -> list[PreTrainedModel]:
        return [self.target] if self.draft is None else [self.target, self.draft]

    @property
    def num_positions(self) -> int | None:
        """Length in tokens of a text that both models can read; None without a limit."""
        limits = [limit for model in self._models if (limit := max_positions(model)) is not None]
        return min(limits, default=None)

    @property
    def num_token_ids(self) -> int:
        """Number of token ids that both models know: families pad their vocabularies differently."""
        return min(int(model.config.get_text_config().vocab_size) for model in self._models)

    @property
    def dtype(self) -> str:
        """Name of the target's precision, such as bfloat16 or int8."""
        return dtype_name(self.target)

    @property
    def device(self) -> torch.device:
        """The device that the target runs on."""
        return execution_device(self.target)

    def cached_target(self, hidden_layers: HiddenLayers = ()) -> CachedModel:
        """Return the target with its own cache."""
        return CachedModel(self.target, hidden_layers=hidden_layers)

    def cached_draft(self, hidden_layers: HiddenLayers = ()) -> CachedModel:
        """Return the draft with its own cache.

        Raises:
            PairError: the pair was loaded without a draft.
        """
        if self.draft is None:
            raise PairError(f"{self.target_name!r} was loaded without a draft; name one with --draft")
        return CachedModel(self.draft, vocab_size=self.vocab_size, hidden_layers=hidden_layers)

    def eagle_head(self, source: str) -> EagleHead:
        """Return an EAGLE-3 head for the target, from a folder or a hub id; loaded once.

        Raises:
            ReprieveError: not found, or unreadable.
            PairError: made for another tokenizer, or for a target of other sizes.
        """
        if source not in self._eagle_heads:
            self._eagle_heads[source] = load_eagle3(source, self.target, identity=self.identity)
        return self._eagle_heads[source]

    @cached_property
    def measured_costs(self) -> StepCosts:
        """Costs of drafting with the draft model and of verifying, measured when first needed."""
        return measure_forwards(self.cached_target(), None if self.draft is None else self.cached_draft())

    @cached_property
    def identity(self) -> PairIdentity:
        """Names and fingerprints, so that runs, labels and heads of other weights or tokenizers do not mix."""
        return PairIdentity(
            target=self.target_name,
            draft=self.draft_name,
            target_weights=weights_fingerprint(self.target),
            draft_weights=None if self.draft is None else weights_fingerprint(self.draft),
            tokenizer=tokenizer_fingerprint(self.tokenizer.get_vocab()),
        )


# Parameters that compressed-tensors adds to a linear layer.
_QUANTISER = frozenset(
    f"{of}_{what}" for of in ("weight", "input", "output") for what in ("scale", "zero_point", "g_idx", "global_scale")
)


def weights_fingerprint(model: PreTrainedModel) -> str:
    """Return a fingerprint of the first values of every tensor, in bfloat16 so that lower precisions match.

    Scales and zero points of compressed-tensors are left out. It registers weights again, after their biases; the usual
    order is restored, so that the checkpoint's files give the same fingerprint.
    """
    weights = {name: weight for name, weight in model.named_parameters() if name.rpartition(".")[2] not in _QUANTISER}
    if getattr(getattr(model, "config", None), "quantization_config", None):
        order = {name: number for number, name in enumerate(parameter_names(model.config))}
        weights = {name: weights[name] for name in sorted(weights, key=lambda name: order.get(name, len(order)))}
    return fingerprint_of(_values(weight.detach()) for weight in weights.values())


def parameter_names(config: PretrainedConfig) -> list[str]:
    """Return the names of a model's parameters in their order, without quantisation; loads no weights."""
    with torch.device("meta"):
        return [name for name, _ in AutoModelForCausalLM.from_config(config).named_parameters()]


def _values(weights: torch.Tensor) -> torch.Tensor:
    """Return flat values; a quantised tensor subclass (torchao's, for example) must be dequantised first."""
    plain = type(weights) in (torch.Tensor, torch.nn.Parameter)
    return (weights if plain else weights.dequantize()).flatten()


def fingerprint_of(tensors: Iterable[torch.Tensor]) -> str:
    """Return the fingerprint of flat tensors, from their first `NUM_VALUES` values."""
    content = bytearray()
    for values in tensors:
        content += values[:NUM_VALUES].to(torch.bfloat16).view(torch.int16).cpu().numpy().tobytes()
    return digest(bytes(content))


def require_device(name: str) -> None:
    """Refuse a device that PyTorch cannot use here, before a model is loaded.

    Raises:
        SpecError: names it, with PyTorch's reason.
    """
    try:
        torch.zeros(1, device=name).item()
    except Exception as error:  # each kind of device has its own
        reason = str(error).partition("\n")[0]
        raise SpecError(f"device {name!r} cannot be used with PyTorch {torch.__version__}: {reason}") from None


def require_same_tokenizer(target: Any, draft: Any, target_name: str, draft_name: str) -> None:
    """Refuse two tokenizers that give tokens different ids.

    Raises:
        PairError: names both and the first difference.
    """
    vocab, draft_vocab = target.get_vocab(), draft.get_vocab()
    if vocab == draft_vocab:
        return
    different = sorted(
        token for token in vocab.keys() | draft_vocab.keys() if vocab.get(token) != draft_vocab.get(token)
    )
    raise PairError(
        f"target {target_name!r} ({len(vocab)} tokens) and draft {draft_name!r} ({len(draft_vocab)} tokens) have "
        f"different tokenizers: {len(different)} tokens differ, such as {different[0]!r} "
        f"({vocab.get(different[0])} and {draft_vocab.get(different[0])}); "
        "a draft must share the target's tokenizer"
    )


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of a model, from the hub, a folder, or the bundled pair.

    Raises:
        ReprieveError: it cannot be found or read.
    """
    try:
        return _read_tokenizer(source_of(name, "target"))
    except (OSError, ValueError) as error:
        raise ReprieveError(f"could not load the tokenizer of {name!r}: {error}") from error


def load_model(
    name: str | Path, role: str, dtype: str, device: str, device_map: str | None = None
) -> tuple[PreTrainedModel, Any]:
    """Return the model of a role (target or draft), and its tokenizer.

    Raises:
        ReprieveError: it cannot be found or loaded.
        UnsupportedModelError: int8 for a model that it does not serve.
    """
    source = source_of(name, role)
    try:
        tokenizer = _read_tokenizer(source)
        shown = logging.is_progress_bar_enabled()
        if str(name) in BUNDLES:  # they load at once
            logging.disable_progress_bar()
        try:
            model = _load_weights(source, dtype, device, device_map)
        finally:
            if shown:
                logging.enable_progress_bar()
        return quantise(model).eval() if dtype == INT8 else model.eval(), tokenizer
    except UnsupportedModelError:
        raise
    except Exception as error:  # third-party files and devices fail in many ways
        raise ReprieveError(f"could not load the {role} {str(name)!r} on {device}: {_why(source, error)}") from error


def _why(source: str | Path, error: Exception) -> str:
    """Return the reason why a model could not be loaded; if there is no such folder, it says so first."""
    if Path(source).exists() or not isinstance(error, OSError):
        return " ".join(str(error).split())
    where = "" if Path(source).is_absolute() else ", and the model hub has no such model or cannot be reached"
    known = f"{', '.join(BUNDLES)}, a folder, or a hub id such as Qwen/Qwen3-0.6B"
    return f"there is no such folder{where}. A model is one of {known}. ({' '.join(str(error).split())})"


def _read_tokenizer(source: str | Path) -> Any:
    folder, gguf = _gguf_arguments(source)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False, **gguf)


def _gguf_arguments(source: str | Path) -> tuple[str | Path, dict[str, Any]]:
    """Return transformers' arguments for a source: a folder or hub id, and the GGUF file in it, if any."""
    path = Path(source)
    if path.suffix != GGUF:
        return source, {}
    if not path.is_file():
        raise ReprieveError(f"{str(source)!r} is not a file; a GGUF model is named by its path")
    import_extra("gguf", "gguf")
    return path.parent, {"gguf_file": path.name}


def _load_weights(source: str | Path, dtype: str, device: str, device_map: str | None) -> PreTrainedModel:
    """Load a model onto its device. Quantised weights are placed while loading; they cannot be moved afterwards.

    Raises:
        ValueError: weights that are missing, unexpected, misshapen or not finite, or a model that needs its own code.
    """
    folder, gguf = _gguf_arguments(source)
    dtype = "float32" if dtype == INT8 else dtype  # quantised afterwards
    if device_map is None and not gguf:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
        device_map = device if getattr(config, "quantization_config", None) else None
    if device_map is not None:
        import_extra("accelerate", "big")
    if gguf:
        gguf["quantization_config"] = GgufConfig(dequantize=True)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map=device_map, trust_remote_code=False, output_loading_info=True, **gguf
    )
    model, found = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    if gguf:  # dequantised: an ordinary model from here on
        vars(model).update(is_quantized=False, hf_quantizer=None)
        model.config.__dict__.pop("quantization_config", None)
    _require_whole(model, found)
    return model if device_map is not None else cast(PreTrainedModel, model.to(device))  # type: ignore[arg-type]


def _require_whole(model: PreTrainedModel, found: Mapping[str, Any]) -> None:
    """Refuse a model with non-finite weights, or with weights that transformers randomly initialised or ignored."""
    for what in ("missing", "mismatched", "unexpected"):
        names = [name if isinstance(name, str) else name[0] for name in found.get(f"{what}_keys") or ()]
        if names := sorted(name for name in names if what != "unexpected" or not _SPARE.search(name)):
            verb = {"missing": "lack", "mismatched": "have another shape for", "unexpected": "have no place for"}[what]
            raise ValueError(
                f"its weights {verb} {names[0]}" + (f" and {len(names) - 1} others" if len(names) > 1 else "")
            )
    for name, parameter in model.named_parameters():
        plain = parameter.is_floating_point() and type(parameter.data) is torch.Tensor and not parameter.is_meta
        if plain and not bool(parameter.detach().sum(dtype=torch.float32).isfinite()):
            raise ValueError(f"its weight {name} is not finite")
