"""Settings of each method as the manifest records them, in one table.

A new method is a class here and a line in METHODS. Knows no tensors; layers are counted from 1.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .method_settings import MethodSettings, Sha256, Share, TextUsed, TrainingRun, span

CrossDraw = Literal["layers", "leaders"]
"""What an R-CLA training draws for a pass: an earlier layer for each layer that crosses, or which layers lead."""
Readout = Literal["mean", "last"]
"""What is classified where no rule fired: the mean of the sentences' states, or the last sentence's."""


class TauPoint(BaseModel, frozen=True):
    """Quality at one threshold, measured at conversion. KL in nats; depth in backbone blocks.

    `exit_histogram[i]` is how many tokens (or which share) left after block i + 1.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    tau: Annotated[float, Field(ge=-1, le=1)]
    kl: float
    agreement: Share
    perplexity: float
    mean_depth: float
    exit_histogram: tuple[int | float, ...] = ()


class River(MethodSettings, frozen=True):
    """River (papers: River-LLM): 4-bit exit layers from `entry_layer` on, left into when cos(h(l-1), h(l)) > tau."""

    name: Literal["river"] = "river"
    quantizer: str
    bits: Literal[4] = 4
    group_size: int
    """Inputs per scale; -1: one scale per output row. Where it does not divide, `layout.choose_group_size` decides."""
    symmetric: bool = False
    float_zeros: bool = False
    entry_layer: Annotated[int, Field(ge=2)] = 2
    exit_layers: tuple[Annotated[int, Field(ge=2)], ...]
    tau: Annotated[float, Field(ge=-1, le=1)]
    thresholds: tuple[Annotated[float, Field(ge=-1, le=1)], ...] | None = None
    """A threshold for each of blocks 1 to L - 1, instead of `tau`; None: `tau` for all."""
    dense_layers: tuple[Annotated[int, Field(ge=2)], ...] = ()
    """Exit layers that are not used: tokens that have left run these blocks with the backbone's weights."""
    tau_curve: tuple[TauPoint, ...] = ()
    max_loss: Annotated[float, Field(ge=0)] | None = None
    """The relative increase of perplexity that `tau` was chosen for; None when `tau` was given."""
    calibration: TextUsed | None = None
    resident: Annotated[int, Field(ge=1)] | None = None
    """Dense blocks kept in device memory, counted from the first; None: all."""
    river_source: str | None = None
    """Id or folder name of the GPTQ checkpoint that the 4-bit weights were taken from."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        layers = self.exit_layers
        if list(layers) != sorted(set(layers)) or not layers or layers[0] < self.entry_layer:
            raise ValueError(f"exit_layers must rise from entry_layer ({self.entry_layer}) on, not {list(layers)}")
        if self.group_size != -1 and (self.group_size <= 0 or self.group_size % 8):
            raise ValueError(f"group_size {self.group_size} is neither -1 nor a multiple of 8")
        if self.thresholds is not None and len(self.thresholds) != layers[-1] - 1:
            raise ValueError(f"{len(self.thresholds)} thresholds do not fit {layers[-1]} blocks")
        if list(self.dense_layers) != sorted(set(self.dense_layers)) or not set(self.dense_layers) <= set(layers):
            raise ValueError(f"dense_layers must rise and be among exit_layers, not {list(self.dense_layers)}")
        if self.resident is not None and self.resident < self.entry_layer - 1:
            raise ValueError(f"resident {self.resident} drops blocks before entry_layer {self.entry_layer}")
        return self

    def misfit(self, layers: int) -> str | None:
        """Every block from the entry layer on has its exit layer, and a threshold where there are several."""
        if self.exit_layers == tuple(range(self.entry_layer, layers + 1)):
            return None
        return f"exit_layers are {span(self.exit_layers)}, the model's are {self.entry_layer} to {layers}"


class RetentionPoint(BaseModel, frozen=True):
    """Held-out perplexity with part of the layers keeping a cache; None: not measured.

    `source` is the model as it came, `trained` the bundle's weights, both under the same map.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    keepers: Annotated[int, Field(gt=0)]
    kv_sources: tuple[Annotated[int, Field(ge=1)], ...]
    source: float | None = None
    trained: float | None = None


class Rcla(MethodSettings, frozen=True):
    """R-CLA (papers: Stochastic KV Routing): layer l reads the keys and values of layer `kv_sources[l - 1]`."""

    name: Literal["rcla"] = "rcla"
    kv_sources: tuple[Annotated[int, Field(ge=1)], ...]
    share_every: Annotated[int, Field(ge=1)] | None = None
    keep_ratio: Annotated[float, Field(gt=0, le=1)] | None = None
    """Set where the map was searched for this share of keepers."""
    cross_prob: Share | None = None
    """Probability that a layer read an earlier layer's keys and values in training; None without training."""
    plain_passes: Share | None = None
    """Share of the training passes in which every layer read its own; None without training."""
    cross_draw: CrossDraw | None = None
    """None without training, and where a bundle is older: `layers`."""
    distill: Annotated[float, Field(gt=0)] | None = None
    """Weight of imitating the pass in which every layer read its own; None where texts alone were learnt."""
    training: TrainingRun | None = None
    retention: tuple[RetentionPoint, ...] = ()

    @property
    def sources(self) -> tuple[int, ...]:
        """The map counted from 0, as `Architecture.share` takes it."""
        return tuple(source - 1 for source in self.kv_sources)

    def misfit(self, layers: int) -> str | None:
        """The map names every layer."""
        count = len(self.kv_sources)
        return None if count == layers else f"kv_sources has {count} layers, the model {layers}"

    @model_validator(mode="after")
    def _earlier_keepers(self) -> Self:
        for layer, source in enumerate(self.kv_sources, 1):
            if source > layer or self.kv_sources[source - 1] != source:
                raise ValueError(f"layer {layer} cannot read the keys and values of layer {source}")
        return self


class Decision(BaseModel, frozen=True):
    """One way to decide, measured on the validation rows. `work` is the share of layers x sentences computed."""

    model_config = ConfigDict(allow_inf_nan=False)
    accuracy: Share
    macro_f1: Share
    work: Share
    mean_layers: Annotated[float, Field(ge=0)]
    mean_sentences: Annotated[float, Field(ge=0)]


class Thresholds(Decision, frozen=True):
    """A point of the two-dimensional frontier (papers: 2D early exit, Algorithm 1)."""

    tau_ignore: Annotated[float, Field(ge=0, le=1)]
    tau_acc: Annotated[float, Field(ge=0)]
    steady: Share | None = None
    """Mean accuracy of this pair and its neighbours on the grid, by which pairs are chosen: one that is lucky on the
    validation rows has none like it around. None: not measured."""


class FixedLayer(Decision, frozen=True):
    """Every document through the first `layer` blocks."""

    layer: Annotated[int, Field(ge=1)]


class LabelledRows(BaseModel, frozen=True):
    """The rows that classifiers were trained or judged on; `name` is a file name, never a path."""

    name: str
    sha256: Sha256
    rows: Annotated[int, Field(gt=0)]
    validation: Annotated[int, Field(ge=0)]
    """How many of them were held out to choose thresholds."""


class TwoDee(MethodSettings, frozen=True):
    """2D early exit (papers: 2dee): a classifier behind every block, and when a document may stop."""

    name: Literal["2dee"] = "2dee"
    labels: Annotated[tuple[str, ...], Field(min_length=2)]
    hidden: Annotated[int, Field(gt=0)] = 256
    blocks: Literal["dense", "4bit"] = "dense"
    """Which blocks documents run through: the backbone's, or a River bundle's exit layers where there are any."""
    prompt: str = ""
    """Read before every document; may be empty."""
    language: str | None = None
    least: Annotated[int, Field(ge=1)]
    """Characters below which a sentence is joined to its neighbour."""
    most: Annotated[int, Field(ge=2)]
    """Characters above which a sentence is cut."""
    max_tokens: Annotated[int, Field(gt=0)]
    """Longer documents are cut, and say so."""
    readout: Readout = "mean"
    depth: Annotated[int, Field(ge=1)] | None = None
    """Two dimensions use the first so many blocks, the classifiers of later ones being no better; None: all."""
    max_drop: Share
    """Accuracy given away for speed when the operating point was chosen."""
    use: Literal["2d", "1d"] = "2d"
    """What `run` does by default: 1d where two dimensions gained nothing."""
    frontier: tuple[Thresholds, ...] = ()
    one_d: tuple[FixedLayer, ...] = ()
    full: FixedLayer
    chosen: Thresholds | None
    """The operating point for `max_drop`; None where no thresholds reach it."""
    chosen_one_d: FixedLayer
    data: LabelledRows
    validation_data: LabelledRows | None = None
    """The file that thresholds were chosen on, where it is one of its own; `data` has no held-out rows then."""
    class_weights: tuple[Annotated[float, Field(gt=0)], ...] = ()
    training: TrainingRun | None = None
    """Only where the backbone was fine-tuned (LoRA)."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len(set(self.labels)) != len(self.labels):
            raise ValueError("labels must differ from each other")
        if self.class_weights and len(self.class_weights) != len(self.labels):
            raise ValueError("class_weights must have one number per label")
        if self.use == "2d" and self.chosen is None:
            raise ValueError("use is '2d', but no thresholds are chosen")
        return self

    def misfit(self, layers: int) -> str | None:
        """No way to decide goes deeper than the model."""
        named = [self.full.layer, self.chosen_one_d.layer, self.depth or 1, *(point.layer for point in self.one_d)]
        return None if max(named) <= layers else f"a decision needs layer {max(named)}, the model has {layers}"


class MeasuredExit(BaseModel, frozen=True):
    """One exit of a mixture on held-out text, as if it spoke alone; `layers`: blocks run before it.

    `mass` is the mean share that the mixture gives it, `perplexity` its own.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    layers: Annotated[int, Field(ge=1)]
    mass: Share
    perplexity: Annotated[float, Field(gt=0)]


class DepthPoint(BaseModel, frozen=True):
    """What the mixture would be with `bias` added to every router's logit of leaving: the trade-off as measured.

    `expected_depth` is the mean share of the blocks that are run, `perplexity` the mixture's.
    """

    model_config = ConfigDict(allow_inf_nan=False)
    bias: float
    expected_depth: Share
    perplexity: Annotated[float, Field(gt=0)]


class Nvium(MethodSettings, frozen=True):
    """N-vium (papers: N-vium): a mixture of exits behind blocks `junctions` (from 1) and behind the last.

    Without junctions there is one exit: a plain language model, the dense twin of a training from scratch.
    """

    name: Literal["nvium"] = "nvium"
    junctions: tuple[Annotated[int, Field(ge=1)], ...] = ()
    final_adapter: bool = False
    """Whether the last exit has an adapter too; never with a frozen backbone, whose last exit is the dense model."""
    router_width: Annotated[int, Field(gt=0)]
    trained: Literal["routers", "all", "scratch"]
    """What training changed: junctions alone, all of a trained model, or a model that began with random weights."""
    blocks: Literal["dense", "4bit"] = "dense"
    """Which blocks run: the backbone's, or a River bundle's exit layers where there are any."""
    beta: float
    """Weight of the compute penalty when training ended; below 0 where depth had to be paid for to reach the target."""
    target_depth: Annotated[float, Field(gt=0, le=1)] | None = None
    """The share of the blocks that a controller steered `beta` towards; None: `beta` was given, and is not below 0."""
    exits: tuple[MeasuredExit, ...] = ()
    """One per junction, and the last."""
    expected_depth: Share | None = None
    """Mean share of the blocks that are run for a token, by the mixture's masses on held-out text."""
    trade_off: tuple[DepthPoint, ...] = ()
    router_bias: float = 0.0
    """Added to every router's logit of leaving when the bundle runs: the depth chosen after training (`tune`)."""
    training: TrainingRun | None = None

    def misfit(self, layers: int) -> str | None:
        """Junctions lie between blocks."""
        deepest = max(self.junctions, default=0)
        return None if deepest < layers else f"a junction lies behind block {deepest}, the model has {layers}"

    @property
    def has_tensors(self) -> bool:
        """Whether there is anything beside the backbone."""
        return bool(self.junctions) or self.final_adapter

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if list(self.junctions) != sorted(set(self.junctions)):
            raise ValueError(f"junctions must rise, not {list(self.junctions)}")
        if self.exits and len(self.exits) != len(self.junctions) + 1:
            raise ValueError(f"{len(self.exits)} exits were measured, there are {len(self.junctions) + 1}")
        if self.beta < 0 and self.target_depth is None:
            raise ValueError(f"beta {self.beta} is below 0, and no controller steered it there")
        if self.final_adapter and self.trained == "routers":
            raise ValueError("the last exit of a frozen backbone has no adapter")
        return self


METHODS: Mapping[str, type[MethodSettings]] = MappingProxyType(
    {"river": River, "rcla": Rcla, "2dee": TwoDee, "nvium": Nvium}
)
