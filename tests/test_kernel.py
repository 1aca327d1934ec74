"""The C kernels: AdamW gives the same bits however it is run, and CRC-32C the same number."""

import errno
from dataclasses import dataclass, fields, replace

import numpy as np
import pytest
import torch

from nvoffload import native

SEED = 20240607
F32, BF16 = 0, 1  # enum nvo_dtype
SCALAR = 0  # enum nvo_simd
TYPE_PAIRS = [(F32, F32), (F32, BF16), (BF16, F32), (BF16, BF16)]
LENGTHS = [*range(71), 255, 256, 257, 1023, 1024, 1025, 4099]
ONE_NAN = 0x7FC00000
GROUP = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.01}


@dataclass
class Arrays:
    """The arrays of a span. 1D, equal lengths; `weight` and `grad` are uint16 where bf16."""

    weight: np.ndarray
    low: np.ndarray
    exp_avg: np.ndarray
    exp_avg_sq: np.ndarray
    grad: np.ndarray

    def map(self, change):
        return Arrays(*(change(getattr(self, field.name)) for field in fields(self)))

    def copy(self):
        return self.map(np.copy)

    def cut(self, start, stop):
        return self.map(lambda array: array[start:stop])

    def raw(self):
        return [getattr(self, field.name).tobytes() for field in fields(self)]


def levels():
    return range(native.lib.nvo_simd_best() + 1)


def prepare(step=1, grad_scale=1.0, **changes):
    group = native.ffi.new("nvo_group *", {**GROUP, **changes})
    out = native.ffi.new("nvo_adamw *")
    native.lib.nvo_adamw_prepare(out, group, grad_scale, step)
    return out


def address(array):
    return native.ffi.cast("void *", array.ctypes.data)


def make_span(on, weight_out=None):
    return native.ffi.new(
        "nvo_span *",
        {
            "weight_in": address(on.weight),
            "weight_out": address(on.weight if weight_out is None else weight_out),
            "low": native.ffi.cast("uint16_t *", on.low.ctypes.data),
            "exp_avg": native.ffi.cast("float *", on.exp_avg.ctypes.data),
            "exp_avg_sq": native.ffi.cast("float *", on.exp_avg_sq.ctypes.data),
            "grad": address(on.grad),
            "numel": on.low.size,
            "weight_dtype": BF16 if on.weight.dtype == np.uint16 else F32,
            "grad_dtype": BF16 if on.grad.dtype == np.uint16 else F32,
        },
    )


def update(on, adamw, simd=None, weight_out=None):
    simd = native.lib.nvo_simd_best() if simd is None else simd
    assert native.lib.nvo_adamw_update(simd, adamw, make_span(on, weight_out)) == 0


def bits_of(array):
    return array.view(np.uint32)


def split(master):
    rounded = (bits_of(master).astype(np.uint64) + 0x8000) >> 16
    return rounded.astype(np.uint16), bits_of(master).astype(np.uint16)


def join(high, low):
    bits = (high.astype(np.uint32) << np.uint32(16)) + low.view(np.int16).astype(np.int32).view(np.uint32)
    return bits.view(np.float32)


def widen(half):
    return (half.astype(np.uint32) << np.uint32(16)).view(np.float32)


def random_arrays(rng, numel, weight_dtype=F32, grad_dtype=F32):
    """Return values as training has them."""
    master = rng.standard_normal(numel).astype(np.float32)
    grad = (rng.standard_normal(numel) * 0.1).astype(np.float32)
    high, low = split(master)
    return Arrays(
        master if weight_dtype == F32 else high,
        low,
        (rng.standard_normal(numel) * 0.01).astype(np.float32),
        (rng.random(numel) * 1e-3).astype(np.float32),
        grad if grad_dtype == F32 else split(grad)[0],
    )


def wild_arrays(rng, numel, weight_dtype, grad_dtype):
    """Return any bit patterns at all, among them NaNs of every kind, infinities and denormals."""

    def words(dtype):
        return rng.integers(0, 1 << 8 * np.dtype(dtype).itemsize, numel, dtype=dtype)

    def typed(dtype):
        return words(np.uint32).view(np.float32) if dtype == F32 else words(np.uint16)

    state = [words(np.uint32).view(np.float32), words(np.uint32).view(np.float32)]
    bits_of(state[1])[::2] &= 0x7FFFFFFF  # a second moment has no sign
    return Arrays(typed(weight_dtype), words(np.uint16), *state, typed(grad_dtype))


def adversarial_arrays(rng, numel):
    """Return magnitudes from denormal to huge, zeros, and moments that the gradient cancels."""

    def spread(low, high):
        exponents = rng.uniform(low, high, numel)
        return (10**exponents * rng.choice([-1.0, 1.0], numel)).astype(np.float32)

    weight, exp_avg, grad = spread(-44, 37), spread(-44, 18), spread(-44, 18)
    exp_avg_sq = np.abs(spread(-44, 36))
    cancel = slice(0, numel // 3)
    exp_avg[cancel] = (-grad[cancel] / 9 * rng.uniform(0.999999, 1.000001, numel // 3)).astype(np.float32)
    for array in (weight, exp_avg, exp_avg_sq, grad):
        array[rng.random(numel) < 0.02] = 0
    return Arrays(weight, np.zeros(numel, np.uint16), exp_avg, exp_avg_sq, grad)


# ---- the formula ---------------------------------------------------------------------------------


def off_by_ulps(result, exact, *terms):
    """Return each error in units of float32's spacing at the largest of the result and its terms."""
    scale = np.max(np.abs(np.stack([exact, *terms])), axis=0)
    scale = np.minimum(scale, np.finfo(np.float32).max).astype(np.float32)
    return np.abs(result.astype(np.float64) - exact) / np.spacing(scale).astype(np.float64)


def exact_moments(on, by):
    """Return both moments after a step, each with its terms, in float64 with the kernel's coefficients."""
    wide = on.map(lambda array: array.astype(np.float64))
    grad = wide.grad * by.grad_scale
    for beta, rest, old, new in (
        (by.beta1, by.beta1_rest, wide.exp_avg, grad),
        (by.beta2, by.beta2_rest, wide.exp_avg_sq, grad * grad),
    ):
        yield beta * old + rest * new, beta * old, rest * new


def exact_weight(before, after, by):
    """Return the weight after a step and its two terms, in float64, from the moments that were stored."""
    kept = before.weight.astype(np.float64) * by.decay
    denom = np.sqrt(after.exp_avg_sq.astype(np.float64)) * by.denom_scale + by.eps
    change = by.step_size * (after.exp_avg.astype(np.float64) / denom)
    return kept - change, kept, change


@pytest.mark.parametrize("make", [random_arrays, adversarial_arrays])
def test_kernel_is_within_two_ulps_of_float64(make):
    """Goal: the arithmetic is as good as float32 allows.
    Method: steps from the kernel's own state, each against the same step in float64. A weight that is
    smaller than its own change gets the five roundings of the change, and four ulps."""
    rng = np.random.default_rng(SEED)
    on = make(rng, 100_000)
    for step in range(1, 9):
        by = prepare(step, lr=0.1)
        before = on.copy()
        update(on, by)
        first, second = exact_moments(before, by)
        weight, kept, change = exact_weight(before, on, by)
        assert off_by_ulps(on.exp_avg, *first).max() <= 2
        assert off_by_ulps(on.exp_avg_sq, *second).max() <= 2
        error = off_by_ulps(on.weight, weight, kept, change)
        assert error[np.abs(change) <= np.abs(kept) / 2].max() <= 2
        assert error.max() <= 4
        on.grad = make(rng, 100_000).grad


@pytest.mark.parametrize("step", [1, 2, 10, 1000, 10**6, 10**12])
def test_coefficients_are_rounded_once(step):
    """Goal: bias corrections don't drift with the step number.
    Method: every coefficient equals the float32 nearest to its value in double."""
    by = prepare(step, grad_scale=1 / 3)
    lr, beta1, beta2 = GROUP["lr"], GROUP["beta1"], GROUP["beta2"]
    exact = {
        "decay": 1 - lr * GROUP["weight_decay"],
        "beta1": beta1,
        "beta1_rest": 1 - beta1,
        "beta2": beta2,
        "beta2_rest": 1 - beta2,
        "denom_scale": 1 / np.sqrt(1 - beta2**step),
        "eps": GROUP["eps"],
        "step_size": lr / (1 - beta1**step),
        "grad_scale": 1 / 3,
    }
    assert {name: getattr(by, name) for name in exact} == {k: float(np.float32(v)) for k, v in exact.items()}


@pytest.mark.parametrize("fused", [False, True])
def test_ten_steps_agree_with_torch(fused):
    """Goal: a drop-in for torch.optim.AdamW.
    Method: the same gradients for ten steps; weights and moments within 1e-6."""
    rng = np.random.default_rng(SEED)
    on = random_arrays(rng, 10_007)
    on.exp_avg[:] = on.exp_avg_sq[:] = 0
    weight = torch.nn.Parameter(torch.from_numpy(on.weight.copy()))
    betas = GROUP["beta1"], GROUP["beta2"]
    peer = torch.optim.AdamW([weight], lr=1e-3, betas=betas, eps=1e-8, weight_decay=GROUP["weight_decay"], fused=fused)
    for step in range(1, 11):
        on.grad = random_arrays(rng, on.low.size).grad
        weight.grad = torch.from_numpy(on.grad.copy())
        peer.step()
        update(on, prepare(step))
    assert np.abs(on.weight - weight.detach().numpy()).max() <= 1e-6
    for name in ("exp_avg", "exp_avg_sq"):
        assert np.abs(getattr(on, name) - peer.state[weight][name].numpy()).max() <= 1e-6


def test_nan_and_infinity_go_where_torch_lets_them_go():
    """Goal: nothing hides a bad value.
    Method: every mix of special values in the four arrays; finite, infinite and NaN alike after a step.
    Left out are a negative second moment, which cannot be, and an infinite first one, which torch's lerp
    makes a NaN at once: it comes from an infinite gradient, and that has made the weight NaN in both."""
    special = np.array([0, -0.0, 1, -1, 1e-45, 1e30, np.inf, -np.inf, np.nan], np.float32)
    grids = np.meshgrid(special, special[~np.isinf(special)], special[~(special < 0)], special)
    weight, exp_avg, exp_avg_sq, grad = (grid.ravel() for grid in grids)
    on = Arrays(weight, np.zeros(weight.size, np.uint16), exp_avg, exp_avg_sq, grad).copy()
    parameter = torch.nn.Parameter(torch.from_numpy(weight.copy()))
    parameter.grad = torch.from_numpy(grad.copy())
    peer = torch.optim.AdamW([parameter], lr=1e-3, foreach=False)
    peer.state[parameter] = {
        "step": torch.tensor(4.0),
        "exp_avg": torch.from_numpy(exp_avg.copy()),
        "exp_avg_sq": torch.from_numpy(exp_avg_sq.copy()),
    }
    peer.step()
    update(on, prepare(5))
    results = {"exp_avg": on.exp_avg, "exp_avg_sq": on.exp_avg_sq}
    theirs = {name: peer.state[parameter][name].numpy() for name in results}
    for ours, other in [*((results[k], theirs[k]) for k in results), (on.weight, parameter.detach().numpy())]:
        assert (np.isnan(ours) == np.isnan(other)).all()
        assert (np.isinf(ours) == np.isinf(other)).all()


# ---- equal bits ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("weight_dtype", "grad_dtype"), TYPE_PAIRS)
@pytest.mark.parametrize("make", [random_arrays, wild_arrays])
def test_levels_give_equal_bits_at_any_length(weight_dtype, grad_dtype, make):
    """Goal: results don't depend on the processor.
    Method: each level against the scalar one, byte by byte, over short and long spans of any bits."""
    if len(levels()) == 1:
        pytest.skip("this processor has one SIMD level")
    rng = np.random.default_rng(SEED)
    by = prepare(3, grad_scale=0.7)
    for numel in LENGTHS:
        on = make(rng, numel, weight_dtype, grad_dtype)
        results = []
        for simd in levels():
            mine = on.copy()
            update(mine, by, simd)
            results.append(mine.raw())
        assert all(result == results[0] for result in results), f"{numel} elements, seed {SEED}"


@pytest.mark.parametrize(("weight_dtype", "grad_dtype"), TYPE_PAIRS)
def test_alignment_changes_no_bit_and_neighbours_are_left_alone(weight_dtype, grad_dtype):
    """Goal: a span may start anywhere in a tile.
    Method: the same elements at every offset of a longer array; the bytes around them stay."""
    rng = np.random.default_rng(SEED)
    by = prepare(3)
    numel = 301
    on = wild_arrays(rng, numel, weight_dtype, grad_dtype)
    for simd in levels():
        expected = on.copy()
        update(expected, by, simd)
        for offset in range(17):
            around = wild_arrays(rng, numel + 64, weight_dtype, grad_dtype)
            inside = around.cut(offset, offset + numel)
            for field in fields(Arrays):
                getattr(inside, field.name)[:] = getattr(on, field.name)
            before = around.copy()
            update(inside, by, simd)
            assert inside.raw() == expected.raw()
            assert around.cut(0, offset).raw() == before.cut(0, offset).raw()
            assert around.cut(offset + numel, None).raw() == before.cut(offset + numel, None).raw()


@pytest.mark.parametrize(("weight_dtype", "grad_dtype"), TYPE_PAIRS)
def test_cutting_a_span_changes_no_bit(weight_dtype, grad_dtype):
    """Goal: results don't depend on tile size, thread count or shard.
    Method: whole against cut in two at every place, and into many pieces at random."""
    rng = np.random.default_rng(SEED)
    by = prepare(3)
    numel = 203
    on = wild_arrays(rng, numel, weight_dtype, grad_dtype)
    cuts = [[cut] for cut in range(numel + 1)]
    cuts += [sorted(rng.integers(0, numel, 6).tolist()) for _ in range(50)]
    for simd in levels():
        whole = on.copy()
        update(whole, by, simd)
        for places in cuts:
            pieces = on.copy()
            for start, stop in zip([0, *places], [*places, numel], strict=True):
                update(pieces.cut(start, stop), by, simd)
            assert pieces.raw() == whole.raw(), f"cut at {places}, seed {SEED}"


@pytest.mark.parametrize(("weight_dtype", "grad_dtype"), TYPE_PAIRS)
def test_weight_may_go_to_another_place(weight_dtype, grad_dtype):
    """Goal: an update may write its weights elsewhere.
    Method: out of place against in place; the source stays as it was."""
    rng = np.random.default_rng(SEED)
    on = random_arrays(rng, 1003, weight_dtype, grad_dtype)
    for simd in levels():
        in_place, apart = on.copy(), on.copy()
        out = np.zeros_like(on.weight)
        update(in_place, prepare(2), simd)
        update(apart, prepare(2), simd, weight_out=out)
        assert apart.weight.tobytes() == on.weight.tobytes()
        assert replace(apart, weight=out).raw() == in_place.raw()


@pytest.mark.parametrize("grad_dtype", [F32, BF16])
def test_split_master_goes_the_way_of_a_whole_one(grad_dtype):
    """Goal: bf16 weights lose nothing against fp32 ones.
    Method: twenty steps on halves and on whole masters, with equal gradients; every bit equal."""
    rng = np.random.default_rng(SEED)
    halves = random_arrays(rng, 5003, BF16, grad_dtype)
    whole = replace(halves.copy(), weight=join(halves.weight, halves.low))
    for step in range(1, 21):
        halves.grad = random_arrays(rng, 5003, BF16, grad_dtype).grad
        whole.grad = widen(halves.grad) if grad_dtype == BF16 else halves.grad
        update(halves, prepare(step))
        update(whole, prepare(step))
        assert join(halves.weight, halves.low).tobytes() == whole.weight.tobytes()
        assert halves.exp_avg.tobytes() == whole.exp_avg.tobytes()


# ---- halves --------------------------------------------------------------------------------------


def rewrite(master):
    """Return the halves after an update that changes nothing: lr 0, no moments, no gradient."""
    numel = master.size
    zeros = [np.zeros(numel, np.float32) for _ in range(3)]
    high, low = split(master)
    on = Arrays(high, low, *zeros)
    update(on, prepare(1, lr=0.0))
    return on.weight, on.low


def sweep_of_masters():
    """Return every high half with each of some low halves."""
    rng = np.random.default_rng(SEED)
    lows = [0, 1, 2, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF, *rng.integers(0, 1 << 16, 8).tolist()]
    highs = np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)
    return np.concatenate([highs | np.uint32(low) for low in lows]).view(np.float32)


def test_halves_restore_every_master_bit_for_bit():
    """Goal: hi and lo hold the whole master.
    Method: all signs, exponents and high fractions, denormals, zeros, infinities, and the finite masters
    whose high half is an infinity: joined after the kernel split them again, they are what they were."""
    master = sweep_of_masters()
    master = master[~np.isnan(master)]
    high, low = rewrite(master)
    assert join(high, low).tobytes() == master.tobytes()
    assert (high == split(master)[0]).all()
    beyond = np.isfinite(master) & (np.abs(master) >= np.float32(3.3961775e38))  # 0x7f7f8000
    assert beyond.any()
    assert (high[beyond] & 0x7FFF == 0x7F80).all()


def test_high_half_is_the_cast_of_torch_except_at_ties():
    """Goal: what the model computes with is what a bf16 cast would give.
    Method: against torch's cast, over the sweep; ties go away from zero, torch's go to even."""
    master = sweep_of_masters()
    master = master[np.isfinite(master)]
    cast = torch.from_numpy(master).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    ties = bits_of(master) & 0xFFFF == 0x8000
    high = rewrite(master)[0]
    assert (high == cast)[~ties].all()
    assert (high != cast)[ties].any()


def test_nan_master_stores_the_quiet_nan():
    """Goal: a NaN never turns into a number, alone or joined.
    Method: every NaN high half with each of some low halves stores 0x7fc0 and 0."""
    master = sweep_of_masters()
    high, low = rewrite(master[np.isnan(master)])
    assert (high == 0x7FC0).all()
    assert (low == 0).all()
    assert np.isnan(join(high, low)).all()


def test_every_stored_nan_is_the_same():
    """Goal: NaNs too are equal bits on every processor.
    Method: any bit patterns; all NaNs in weights and moments are one word, at every level."""
    on = wild_arrays(np.random.default_rng(SEED), 4099, F32, F32)
    for simd in levels():
        mine = on.copy()
        update(mine, prepare(3), simd)
        for array in (mine.weight, mine.exp_avg, mine.exp_avg_sq):
            nans = bits_of(array)[np.isnan(array)]
            assert nans.size > 0
            assert (nans == ONE_NAN).all()


# ---- the call ------------------------------------------------------------------------------------


def test_calls_that_cannot_work_are_refused_and_change_nothing():
    """Goal: a wrong code is an error, not a wrong result.
    Method: unknown types, levels and a negative length; -EINVAL and the same bytes."""
    on = random_arrays(np.random.default_rng(SEED), 33)
    before, by = on.raw(), prepare()
    wrong = {"weight_dtype": [2, -1, 3], "grad_dtype": [2, -1, 3], "numel": [-1]}
    for name, values in wrong.items():
        for value in values:
            span = make_span(on)
            setattr(span, name, value)
            assert native.lib.nvo_adamw_update(SCALAR, by, span) == -errno.EINVAL
    for simd in (-1, native.lib.nvo_simd_best() + 1):
        assert native.lib.nvo_adamw_update(simd, by, make_span(on)) == -errno.EINVAL
    assert on.raw() == before


@pytest.mark.parametrize(("weight_dtype", "grad_dtype"), TYPE_PAIRS)
def test_stream_touches_every_word_and_leaves_it(weight_dtype, grad_dtype):
    """Goal: the ceiling of the benchmark moves what an update moves.
    Method: with 0 nothing changes; with all bits set, every word that an update stores is inverted."""
    before = wild_arrays(np.random.default_rng(SEED), 1003, weight_dtype, grad_dtype)
    for simd in levels():
        on = before.copy()
        assert native.lib.nvo_adamw_stream(simd, 0, make_span(on)) == 0
        assert on.raw() == before.raw()
        assert native.lib.nvo_adamw_stream(simd, 0xFFFFFFFF, make_span(on)) == 0
        assert (bits_of(on.exp_avg_sq) == ~bits_of(before.exp_avg_sq)).all()
        assert (on.weight.view(np.uint16) == ~before.weight.view(np.uint16)).all()
        assert weight_dtype == F32 or (on.low == ~before.low).all()


# ---- checksums -----------------------------------------------------------------------------------


def crc_functions():
    return [native.lib.nvo_crc32c, native.lib.nvo_crc32c_soft]


def crc_of(function, data, crc=0):
    return function(crc, native.ffi.from_buffer(data), len(data))


def plain_crc32c(data):
    """Return the checksum by its definition, a bit at a time."""
    reg = 0xFFFFFFFF
    for byte in data:
        reg ^= byte
        for _ in range(8):
            reg = (reg >> 1) ^ (0x82F63B78 if reg & 1 else 0)
    return reg ^ 0xFFFFFFFF


@pytest.mark.parametrize("which", [0, 1])
def test_crc_is_crc32c(which):
    """Goal: the checksum is the standard one, so that other tools can verify a store.
    Method: the published check values, and the definition on random bytes."""
    function = crc_functions()[which]
    assert crc_of(function, b"123456789") == 0xE3069283
    assert crc_of(function, bytes(32)) == 0x8A9136AA  # RFC 3720, B.4
    assert crc_of(function, b"\xff" * 32) == 0x62A8AB43
    assert crc_of(function, b"") == 0
    data = np.random.default_rng(SEED).bytes(3000)
    assert crc_of(function, data) == plain_crc32c(data)


def test_crc_in_hardware_equals_software():
    """Goal: a store moves between processors.
    Method: random offsets and lengths, short ones and ones around the lengths that are cut in three."""
    rng = np.random.default_rng(SEED)
    data = rng.integers(0, 256, 100_000, dtype=np.uint8)
    around = [3 * run * times + delta for run in (256, 4096) for times in (1, 2, 7) for delta in (-8, -1, 0, 1, 9)]
    lengths = [*range(80), *around, *rng.integers(0, 90_000, 150).tolist()]
    hard, soft = crc_functions()
    for length in lengths:
        offset = int(rng.integers(0, 100))
        start = int(rng.integers(0, 1 << 32))
        piece = data[offset : offset + length]
        assert crc_of(hard, piece, start) == crc_of(soft, piece, start), f"{length} at {offset}, seed {SEED}"


@pytest.mark.parametrize("which", [0, 1])
def test_crc_of_pieces_chained_is_crc_of_the_whole(which):
    """Goal: a tile may be checked in chunks.
    Method: cut at random places, continue from piece to piece."""
    rng = np.random.default_rng(SEED)
    function = crc_functions()[which]
    data = rng.integers(0, 256, 50_000, dtype=np.uint8)
    whole = crc_of(function, data)
    for _ in range(50):
        crc = 0
        for piece in np.split(data, np.sort(rng.integers(0, data.size, 4))):
            crc = crc_of(function, piece, crc)
        assert crc == whole


@pytest.mark.parametrize("which", [0, 1])
def test_crc_sees_every_flipped_bit(which):
    """Goal: one wrong bit in a tile is found.
    Method: flip each of 500 random bits, and every bit of the first and last word, one at a time."""
    rng = np.random.default_rng(SEED)
    function = crc_functions()[which]
    data = rng.integers(0, 256, 20_011, dtype=np.uint8)
    whole = crc_of(function, data)
    last = data.size * 8
    for bit in [*range(64), *range(last - 64, last), *rng.integers(0, last, 500).tolist()]:
        data[bit // 8] ^= 1 << bit % 8
        assert crc_of(function, data) != whole, f"bit {bit}, seed {SEED}"
        data[bit // 8] ^= 1 << bit % 8
