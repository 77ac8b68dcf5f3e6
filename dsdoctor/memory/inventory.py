"""What a model is made of, as far as memory goes: every parameter with its size, in the order of the forward pass.

Counts are elements. Where the names and sizes of the single parameters are not known (only their number is), equal
layers stand for them, and `Inventory.made_up` says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from dsdoctor.memory.parameter import Parameter
from dsdoctor.memory.shape import Shape
from dsdoctor.runs.facts import ModelFacts

TYPICAL_LAYERS = 32
"""Layers of a language model of 7 billion parameters; what is assumed where nobody says."""
DTYPE_BYTES = {
    "float64": 8.0,
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float8_e4m3fn": 1.0,
    "float8_e5m2": 1.0,
    "int8": 1.0,
    "uint8": 1.0,
    "int64": 8.0,
    "int32": 4.0,
    "int16": 2.0,
    "bool": 1.0,
}


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The parameters of a model, as one rank holds them where expert parallelism has split them already.

    `expert_parallel` is the number of ranks over which the experts were split before this list was made. `source` says
    where the list comes from, for the report.
    """

    parameters: tuple[Parameter, ...]
    name: str = "model"
    source: str = ""
    expert_parallel: int = 1
    tied: int = 0
    """Elements of the largest parameter that is used in two places, such as embeddings that are the head too."""
    partitioned: bool = False
    """It was built under `zero.Init`."""
    shape: Shape | None = None
    """For the activations; None where the model is not known to be a transformer."""
    made_up: tuple[str, ...] = ()
    """Sentences on what was assumed to make the list."""
    dtypes: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def all(self) -> int:
        return sum(one.elements for one in self.parameters)

    @cached_property
    def trainable(self) -> int:
        return sum(one.elements for one in self.parameters if one.trainable)

    @property
    def frozen(self) -> int:
        return self.all - self.trainable

    @cached_property
    def experts(self) -> int:
        """Elements of parameters that belong to experts."""
        return sum(one.elements for one in self.parameters if one.expert)

    @cached_property
    def loaded(self) -> int:
        """Bytes of the model as the script builds it."""
        return round(sum(one.loaded * one.elements for one in self.parameters))

    @cached_property
    def largest(self) -> int:
        """The largest parameter, trained or not."""
        return max((one.elements for one in self.parameters), default=0)

    @cached_property
    def largest_parameter(self) -> int:
        """The largest trainable one (of all, where none is)."""
        return max((one.elements for one in self.parameters if one.trainable), default=self.largest)

    @cached_property
    def largest_untied(self) -> int:
        """The largest trainable parameter that is used in one place only."""
        sizes = sorted(one.elements for one in self.parameters if one.trainable)
        if self.tied in sizes:
            sizes.remove(self.tied)
        return max(sizes, default=0)

    def fullest_bucket(self, size: int) -> int:
        """Most elements that a reduction of more than one gradient holds, with buckets of that size."""
        return max((total for total, count in self._packed(size) if count > 1), default=0)

    def first_bucket(self, size: int) -> int:
        """Elements in the first bucket that fills up; 0 where the first gradient does not go into one."""
        first, _ = self._packed(size)[0]
        return first if first <= size else 0

    def largest_group(self, size: int, ranks: int) -> int:
        """Elements of one rank in the largest of stage 3's sub-groups, each of which ends once it has reached a size.

        Source: `_create_fp16_sub_groups`.
        """
        if size >= self.shard(ranks, trainable=True):
            return self.shard(ranks, trainable=True)
        largest = total = 0
        for one in self.parameters:
            total += -(-one.elements // ranks) if one.trainable else 0
            largest, total = (max(largest, total), 0) if total >= size else (max(largest, total), total)
        return largest

    def _packed(self, size: int) -> list[tuple[int, int]]:
        """Elements and gradients in each bucket, in the order of the forward pass; one that is too large is alone."""
        if size not in self._buckets:
            buckets, total, count = [], 0, 0
            for one in self.parameters:
                if one.trainable and count and total + one.elements > size:
                    buckets.append((total, count))
                    total = count = 0
                total, count = (total + one.elements, count + 1) if one.trainable else (total, count)
            self._buckets[size] = [*buckets, (total, count)]
        return self._buckets[size]

    @cached_property
    def _buckets(self) -> dict[int, list[tuple[int, int]]]:
        return {}

    @cached_property
    def largest_module(self) -> int:
        """Elements of the module with the most parameters of its own."""
        return max(self._modules.values(), default=0)

    @cached_property
    def _modules(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for one in self.parameters:
            sizes[one.module] = sizes.get(one.module, 0) + one.elements
        return sizes

    def shard(self, ranks: int, *, trainable: bool | None = None, expert: bool | None = None) -> int:
        """Elements of one rank's part at stage 3, where every parameter is cut by itself and rounded up."""
        key = (ranks, trainable, expert)
        if key not in self._shards:
            self._shards[key] = sum(-(-one.elements // ranks) for one in self._chosen(trainable, expert))
        return self._shards[key]

    @cached_property
    def _shards(self) -> dict[tuple[int, bool | None, bool | None], int]:
        """Sums that the rows of the ladder ask for again and again."""
        return {}

    def count(self, *, trainable: bool | None = None, expert: bool | None = None) -> int:
        return self.shard(1, trainable=trainable, expert=expert)

    def persistent(self, threshold: int, most: int) -> int:
        """Elements of the parameters that stage 3 keeps whole: those up to a threshold, in order, up to `most`."""
        kept = 0
        for elements in self._up_to(threshold):
            kept += elements if kept + elements <= most else 0
        return kept

    def _up_to(self, threshold: int) -> list[int]:
        """Sizes of the parameters up to a threshold, in order."""
        if threshold not in self._small:
            self._small[threshold] = [one.elements for one in self.parameters if one.elements <= threshold]
        return self._small[threshold]

    @cached_property
    def _small(self) -> dict[int, list[int]]:
        return {}

    def _chosen(self, trainable: bool | None, expert: bool | None) -> Iterable[Parameter]:
        return (
            one
            for one in self.parameters
            if (trainable is None or one.trainable is trainable) and (expert is None or one.expert is expert)
        )


def of_facts(facts: ModelFacts) -> Inventory:
    """The inventory of a model that a run has seen. Its sizes are exact, the cut into layers is made up."""
    largest = max(1, min(facts.largest_layer or facts.parameters, facts.parameters))
    whole = [one / max(1, facts.parameters) for _, one in facts.dtypes]
    loaded = sum(
        DTYPE_BYTES.get(name.removeprefix("torch."), 4.0) * share
        for (name, _), share in zip(facts.dtypes, whole, strict=True)
    )
    parts = [
        *_cut("trained", facts.trainable, largest, trainable=True, loaded=loaded or 4.0),
        *_cut("frozen", facts.parameters - facts.trainable, largest, trainable=False, loaded=loaded or 4.0),
    ]
    return Inventory(
        parameters=tuple(parts),
        name=facts.class_name,
        source="the model that the script built",
        partitioned=facts.partitioned,
        dtypes=dict(facts.dtypes),
        made_up=("layers are taken to be as large as the largest one",),
    )


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a user may say of a model beside its number of parameters."""

    layers: int | None = None
    largest_layer: int | None = None
    hidden: int | None = None
    heads: int | None = None
    vocab: int | None = None


def of_number(parameters: int, sizes: Sizes = Sizes()) -> Inventory:
    """A model of which only the number of parameters is known, and perhaps some sizes. Raises ValueError."""
    layers = sizes.layers or TYPICAL_LAYERS
    outside = (sizes.vocab or 0) * (sizes.hidden or 0)
    if 2 * outside >= parameters:
        raise ValueError(f"two matrices of vocabulary x hidden size alone have {2 * outside:,} parameters")
    said = [] if sizes.layers or sizes.largest_layer else [f"{layers} equal layers; give --layers or --largest-layer"]
    largest = min(sizes.largest_layer or -(-(parameters - 2 * outside) // layers), parameters)
    ends = [Parameter(name, outside) for name in ("embedding.weight", "head.weight") if outside]
    within = _cut("layer", parameters - 2 * outside, largest, trainable=True, loaded=4.0)
    return Inventory(
        parameters=(*ends[:1], *within, *ends[1:]),
        source=f"{parameters:,} parameters",
        shape=_shape(parameters - 2 * outside, layers, sizes),
        made_up=(*said, "the model is built in fp32 and all of it is trained"),
    )


def _shape(parameters: int, layers: int, sizes: Sizes) -> Shape | None:
    """A gated feed-forward part takes what attention leaves of a layer; None without hidden size and vocabulary."""
    if not sizes.hidden or not sizes.vocab or not sizes.layers:
        return None
    hidden = sizes.hidden
    heads = sizes.heads or max(1, hidden // 128)
    inner = max(hidden, (parameters // layers - 4 * hidden**2) // (3 * hidden))
    return Shape(
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocab=sizes.vocab,
        intermediate=inner,
        kv_heads=heads,
        head=max(1, hidden // heads),
        approximate=True,
    )


def with_adapters(model: Inventory, trainable: int) -> Inventory:
    """The model frozen, and that many parameters in adapters beside its layers (LoRA). Raises ValueError."""
    if trainable > model.all:
        raise ValueError(f"{trainable:,} trainable parameters are more than the model has")
    layers = model.shape.layers if model.shape is not None else TYPICAL_LAYERS
    frozen = tuple(one._replace(trainable=False) for one in model.parameters)
    adapters = _cut("adapter", trainable, -(-trainable // (4 * layers)), trainable=True, loaded=4.0)
    said = (*model.made_up, "what is trained is counted as adapters beside the frozen model (LoRA)")
    return replace(model, parameters=(*frozen, *adapters), tied=0, made_up=said)


def split_experts(model: Inventory, ranks: int) -> Inventory:
    """The experts spread over ranks by expert parallelism (`expert_parallel.autoep_size`)."""
    if ranks <= 1 or not model.experts:
        return model
    own = tuple(one._replace(elements=-(-one.elements // ranks)) if one.expert else one for one in model.parameters)
    return replace(model, parameters=own, expert_parallel=ranks)


def _cut(name: str, elements: int, largest: int, *, trainable: bool, loaded: float) -> list[Parameter]:
    """Layers of the largest size, and what is left over as one more; not more than 10,000 of them."""
    size = max(largest, -(-elements // 10_000))
    full, rest = divmod(elements, size) if size else (0, 0)
    sizes = [size] * full + ([rest] if rest else [])
    return [Parameter(f"{name}.{index}.weight", size, trainable, loaded) for index, size in enumerate(sizes)]
