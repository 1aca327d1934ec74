"""Which parameters travel together, where they lie, and how much room is made for them."""

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from nvoffload.errors import ConfigError
from nvoffload.layout import ALIGN, choose_buffer_count, choose_frames
from nvoffload.partition import Cut, build_layout, cut_units, named_parameters, owners_of
from tests.models import Block, t2, tiny

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:Initializing zero-element")]

MIB = 1 << 20


def cuts_of(module: nn.Module, units: object = "auto") -> dict[str, Cut]:
    """Return the units by name, after the claims that hold for any model."""
    params = named_parameters(module)
    cuts = cut_units(module, params, units)
    assert sorted(i for cut in cuts for i in cut.params) == list(range(len(params)))
    assert [cut.params[0] for cut in cuts] == sorted(cut.params[0] for cut in cuts)
    names = {name for name, _ in module.named_modules()}
    for cut in cuts:
        assert cut.params == tuple(sorted(cut.params))
        assert cut.modules
        assert len(set(cut.modules)) == len(cut.modules)
        assert names.issuperset(cut.modules)
    assert len({cut.name for cut in cuts}) == len(cuts)
    return {cut.name: cut for cut in cuts}


def names_in(module: nn.Module, cut: Cut) -> list[str]:
    names = list(named_parameters(module))
    return [names[index] for index in cut.params]


def test_a_transformer_is_cut_into_its_blocks() -> None:
    """Blocks travel alone; the tied embedding and head are one unit, the norm is the root's.
    T2, every hook and every kept mark."""
    model = t2()
    cuts = cuts_of(model)
    assert list(cuts) == ["embed + head", "blocks.0", "blocks.1", "(root)"]
    assert cuts["embed + head"] == Cut("embed + head", ("embed", "head"), (0,), is_kept=True)
    assert cuts["(root)"].modules == ("", "norm")
    assert names_in(model, cuts["(root)"]) == ["norm.weight", "norm.bias"]
    assert cuts["(root)"].is_kept
    block = cuts["blocks.1"]
    assert block.modules == ("blocks.1", *(f"blocks.1.{at}" for at in ("norm1", "norm2", "qkv", "out", "up", "down")))
    assert all(name.startswith("blocks.1.") for name in names_in(model, block))
    assert not block.is_kept


def test_tiny_has_two_units_and_no_root() -> None:
    assert cuts_of(tiny()) == {"0": Cut("0", ("0",), (0, 1), False), "2": Cut("2", ("2",), (2, 3), False)}


def test_nothing_inside_a_unit_is_cut() -> None:
    """Goal: nested lists are cut where they are met first. Method: stages of blocks with lists of their own."""

    class Stage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Block(8, 2) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    model = nn.ModuleDict({"encoder": nn.ModuleDict({"stages": nn.ModuleList(Stage() for _ in range(3))})})
    assert list(cuts_of(model)) == [f"encoder.stages.{i}" for i in range(3)]
    assert list(cuts_of(Stage())) == ["layers.0", "layers.1"]


def test_lists_of_lists_are_cut_to_the_layer() -> None:
    """Goal: a layer written as a list is a unit, a list of layers is not.
    Method: [[attention, mlp], ...] with hooks on what is called, and [[block, block], [block, block]]."""
    layers = nn.ModuleList(nn.ModuleList([Block(8, 2), nn.Linear(8, 8)]) for _ in range(2))
    cuts = cuts_of(layers)
    assert list(cuts) == ["0", "1"]
    assert cuts["1"].modules[:2] == ("1.0", "1.1")
    assert "1" not in cuts["1"].modules
    stages = nn.ModuleList(nn.ModuleList(Block(8, 2) for _ in range(2)) for _ in range(2))
    assert list(cuts_of(stages)) == ["0.0", "0.1", "1.0", "1.1"]


def test_mixed_classes_and_single_children_go_to_the_root() -> None:
    mixed = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    assert list(cuts_of(mixed)) == ["(root)"]
    assert cuts_of(mixed)["(root)"].modules == ("", "0", "1", "2")
    assert list(cuts_of(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))) == ["(root)"]


def test_a_module_dict_is_never_cut() -> None:
    """Goal: experts stay in their block, or in the root. Method: a ModuleDict in blocks, and at the top."""

    class Moe(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    cuts = cuts_of(nn.Sequential(Moe(), Moe()))
    assert list(cuts) == ["0", "1"]
    assert cuts["0"].modules == ("0", "0.experts.a", "0.experts.b", "0.experts.c")
    assert list(cuts_of(Moe())) == ["(root)"]
    gpt = nn.ModuleDict({"wte": nn.Embedding(9, 4), "h": nn.ModuleList(Moe() for _ in range(2))})
    assert list(cuts_of(gpt)) == ["(root)", "h.0", "h.1"]


def test_a_large_module_of_the_rest_is_a_unit() -> None:
    """Goal: what is large doesn't stay in the root. Method: one element below and at the bound, on the meta device."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.empty(2 * MIB))
            self.embed = nn.Embedding(1024, 1024)
            self.small = nn.Linear(MIB - 1, 1, bias=False)
            self.layers = nn.ModuleList(Block(8, 2) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with torch.device("meta"):
        model = Model()
    cuts = cuts_of(model)
    assert list(cuts) == ["(root)", "embed", "layers.0", "layers.1"]
    assert cuts["embed"].modules == ("embed",)
    assert not cuts["embed"].is_kept
    assert names_in(model, cuts["(root)"]) == ["position", "small.weight"]


def test_a_large_module_around_other_units_is_kept() -> None:
    """Goal: frames are free for the units within. Method: an encoder with a large table beside its layers."""

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.ParameterList([torch.empty(MIB)])
            self.layers = nn.ModuleList(Block(8, 2) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with torch.device("meta"):
        cuts = cuts_of(nn.ModuleDict({"encoder": Encoder()}))
    assert list(cuts) == ["encoder", "encoder.layers.0", "encoder.layers.1"]
    assert [cut.is_kept for cut in cuts.values()] == [True, False, False]


def test_attention_reads_its_output_projection_itself() -> None:
    """MultiheadAttention never calls out_proj: hooks there would not run.
    A large one in the rest."""
    with torch.device("meta"):
        model = nn.ModuleDict({"attention": nn.MultiheadAttention(1024, 8)})
    cuts = cuts_of(model)
    assert cuts["attention"].modules == ("attention",)
    assert len(cuts["attention"].params) == 4


def test_parameter_lists_belong_to_the_module_around_them() -> None:
    """Goal: hooks sit where forward runs. Method: ParameterList and ParameterDict in units and in the root."""

    class Prompt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList([torch.ones(3), torch.ones(2)])
            self.named = nn.ParameterDict({"a": torch.ones(4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    units = nn.Sequential(Prompt(), Prompt())
    assert [cut.modules for cut in cuts_of(units).values()] == [("0",), ("1",)]
    root = nn.ModuleDict({"prompt": Prompt()})
    assert cuts_of(root)["(root)"].modules == ("", "prompt")
    owners = owners_of(units, named_parameters(units))
    assert owners[:3] == [[("0.parts", "0")], [("0.parts", "1")], [("0.named", "a")]]

    class Lists(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lists = nn.ModuleList(nn.ParameterList([torch.ones(3)]) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    assert cuts_of(Lists()) == {"(root)": Cut("(root)", ("",), (0, 1), is_kept=True)}


def test_parameters_shared_between_units_are_a_unit_of_their_own() -> None:
    """Goal: each owner's forward finds what it needs. Method: blocks that share a weight two and two, and a bias tied
    to another module of one of the pairs."""
    blocks = nn.ModuleList(Block(8, 2) for _ in range(4))
    blocks[1].up.weight = blocks[0].up.weight
    blocks[1].up.bias = blocks[2].up.bias
    blocks[3].norm2.weight = blocks[3].norm1.weight
    params = named_parameters(blocks)
    cuts = cuts_of(blocks)
    assert list(cuts) == ["0", "0.up + 1.up + 2.up", "1", "2", "3"]
    tied = cuts["0.up + 1.up + 2.up"]
    assert tied.is_kept
    assert tied.modules == ("0.up", "1.up", "2.up")
    assert names_in(blocks, tied) == ["0.up.weight", "1.up.bias"]
    assert "1.up" not in cuts["1"].modules
    owners = dict(zip(params, owners_of(blocks, params), strict=True))
    assert owners["0.up.weight"] == [("0.up", "weight"), ("1.up", "weight")]
    assert owners["3.norm1.weight"] == [("3.norm1", "weight"), ("3.norm2", "weight")]


def test_a_tie_of_many_has_a_short_name() -> None:
    blocks = nn.ModuleList(Block(8, 2) for _ in range(6))
    for block in blocks:
        block.norm1.weight = blocks[0].norm1.weight
    assert "0.norm1 + 1.norm1 + 2.norm1 + 3 more" in cuts_of(blocks)


def test_a_shared_module_has_one_place() -> None:
    """Goal: a module object registered twice is one unit, entered twice; in two units, it is a tie.
    Method: the same block twice in a list, and the same module within two blocks."""
    first, second = Block(8, 2), Block(8, 2)
    cuts = cuts_of(nn.ModuleList([first, second, first]))
    assert {name: cut.is_kept for name, cut in cuts.items()} == {"0": False, "1": False}
    assert list(cuts_of(nn.Sequential(first, first))) == ["(root)"]
    second.norm1 = first.norm1
    model = nn.ModuleList([first, second])
    cuts = cuts_of(model)
    assert cuts["0.norm1"] == Cut("0.norm1", ("0.norm1",), (0, 1), is_kept=True)
    assert owners_of(model, named_parameters(model))[0] == [("0.norm1", "weight")]


def test_empty_parameters_and_models_are_legal() -> None:
    """Goal: nothing to gather is no special case. Method: units of empty parameters, a model of none."""
    assert cut_units(nn.ReLU(), {}) == []
    assert build_layout({}, None, []).units == ()
    model = nn.Sequential(nn.Linear(0, 3, bias=False), nn.Linear(3, 2, bias=False))
    params = named_parameters(model)
    layout = build_layout(params, None, cut_units(model, params))
    assert [(unit.name, unit.nbytes, len(unit.tiles)) for unit in layout.units] == [("0", 0, 0), ("1", ALIGN, 1)]
    assert layout.place_of(0) == (0, 0)


@pytest.mark.parametrize(
    ("units", "expected"),
    [
        (Block, ["embed + head", "blocks.0", "blocks.1", "(root)"]),
        ([Block, nn.LayerNorm], ["embed + head", "blocks.0", "blocks.1", "norm"]),
        (nn.LayerNorm, ["embed + head", "(root)", "norm"]),
        (lambda name, _: name == "blocks.1", ["embed + head", "(root)", "blocks.1"]),
        (lambda name, module: isinstance(module, nn.ModuleList), ["embed + head", "blocks", "(root)"]),
        (nn.Module, ["(root)"]),
    ],
)
def test_classes_and_predicates_choose_units(units: object, expected: list[str]) -> None:
    """Goal: what matches from the root down is a unit, ties and the rest as ever. Method: T2 cut in all ways."""
    cuts = cuts_of(t2(), units)
    assert [name for name in cuts if name.count(".") <= 1] == expected


@pytest.mark.parametrize(
    "units", ["blocks", None, 3, nn.Linear(1, 1), ["Block"], [], [Block, 3], int, nn.ModuleList([nn.Linear(1, 1)])]
)
def test_other_values_of_units_are_refused(units: object) -> None:
    with pytest.raises(ConfigError, match=r'^units=.* It is "auto", a class of modules, a collection of such'):
        cuts_of(t2(), units)


@pytest.mark.parametrize("units", [nn.Conv2d, (nn.GELU, nn.Conv2d), lambda name, module: False])
def test_units_that_match_nothing_say_what_would(units: object) -> None:
    with pytest.raises(ConfigError, match=r"matches no module.*Classes that would: Block, Embedding, Linear\."):
        cuts_of(t2(), units)


@st.composite
def models(draw: st.DrawFn) -> nn.Module:
    """A tree of lists, dicts, sequences and holders over linears, some empty, tied, frozen or in bf16."""
    make: list[Callable[[list[nn.Module]], nn.Module]] = [
        nn.ModuleList,
        lambda children: nn.Sequential(*children),
        lambda children: nn.ModuleDict({f"k{i}": child for i, child in enumerate(children)}),
    ]

    def tree(depth: int) -> nn.Module:
        if depth == 0 or draw(st.booleans()):
            linear = nn.Linear(draw(st.sampled_from([0, 1, 17, 60])), draw(st.sampled_from([1, 33, 100])))
            linear.requires_grad_(draw(st.booleans()))
            return linear.bfloat16() if draw(st.booleans()) else linear
        return draw(st.sampled_from(make))([tree(depth - 1) for _ in range(draw(st.integers(1, 4)))])

    model = nn.ModuleList([tree(3), tree(2)])
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for _ in range(draw(st.integers(0, 3))):
        a, b = draw(st.sampled_from(linears)), draw(st.sampled_from(linears))
        b.bias = a.bias
    return model


@settings(max_examples=150, deadline=None, derandomize=True)
@given(models(), st.sampled_from(["auto", nn.Linear, nn.ModuleList]))
def test_every_parameter_has_one_unit_and_one_place(model: nn.Module, units: object) -> None:
    """Goal: gathered memory is 64-byte aligned, disjoint and covered by the unit's own tiles in order.
    Method: random trees with ties, two dtypes, frozen and empty parameters."""
    cuts_of(model, units)
    params = named_parameters(model)
    cuts = cut_units(model, params, units)
    layout = build_layout(params, 16 * ALIGN, cuts)
    spans: list[list[tuple[int, int]]] = [[] for _ in layout.units]
    for index, param in enumerate(params.values()):
        unit, offset = layout.place_of(index)
        assert index in layout.units[unit].params
        assert offset % 64 == 0
        spans[unit].append((offset, offset + param.numel() * param.element_size()))
    end_tile = 0
    for unit, cut, found in zip(layout.units, cuts, spans, strict=True):
        assert (unit.name, unit.params, unit.is_kept) == (cut.name, cut.params, cut.is_kept)
        assert unit.tiles.start == end_tile
        end_tile = unit.tiles.stop
        assert all(layout.flats[layout.tiles[i].flat] in [layout.flats[f] for f in unit.flats] for i in unit.tiles)
        assert {s.param for i in unit.tiles for s in layout.tiles[i].segments} <= set(unit.params)
        assert unit.nbytes == sum(layout.tiles[i].fetched_bytes for i in unit.tiles)
        assert all(offset % ALIGN == 0 for offset in unit.flat_offsets)
        used = [span for span in sorted(found) if span[0] < span[1]]
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(used))
        assert all(end <= unit.nbytes for _, end in used)
    assert end_tile == len(layout.tiles)
    assert sorted(f for unit in layout.units for f in unit.flats) == list(range(len(layout.flats)))


def test_the_digest_covers_the_cuts_and_the_fingerprint_does_not() -> None:
    """Goal: a store cut otherwise is not read, yet is known as the same model. Method: one model, two cuts."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    params = named_parameters(model)
    whole = build_layout(params, None, [Cut("(root)", ("",), (0, 1), True)])
    halves = build_layout(params, None, cut_units(model, params))
    assert len(whole.units) == 1
    assert whole.digest != halves.digest
    assert whole.fingerprint == halves.fingerprint
    moved = [Cut("(root)", ("",), (0,), True), Cut("1", ("1",), (1,), False)]
    assert build_layout(params, None, moved).digest == halves.digest  # names and hooks place no byte


def test_frames_fit_the_budget() -> None:
    """Goal: frames and kept units never exceed the budget. Method: sizes around each bound."""
    assert [choose_frames(10, 5, n, None) for n in (0, 1, 2, 3, 9)] == [0, 1, 2, 3, 3]
    assert [choose_frames(10, 5, 9, budget) for budget in (25, 34, 35, 1000)] == [2, 2, 3, 9]
    assert choose_frames(10, 5, 1, 15) == 1
    assert choose_frames(0, 5, 0, 5) == 0
    for num_units, budget, least in ((9, 24, 25), (1, 14, 15), (0, 4, 5)):
        with pytest.raises(ConfigError, match=f"device_budget={budget} bytes .* The least is {least} bytes"):
            choose_frames(10, 5, num_units, budget)


def test_the_pool_holds_the_queue_and_two_units() -> None:
    """Goal: the pool's size is that of the documentation. Method: the figures given there, and the caps."""
    queue_bytes, memory_bytes = 32 * MIB, 1 << 40
    assert choose_buffer_count(MIB, 224, queue_bytes, memory_bytes, 64 * MIB) == 16
    assert choose_buffer_count(MIB, 224, queue_bytes, memory_bytes) == 8
    assert choose_buffer_count(4096, 2, queue_bytes, memory_bytes, 4096) == 3
    assert choose_buffer_count(MIB, 224, queue_bytes, 4 * 80 * MIB, 64 * MIB) == 5
    assert choose_buffer_count(MIB, 224, queue_bytes, 0, 64 * MIB) == 2
