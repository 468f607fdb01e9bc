"""Bytes of programs, against arithmetic done by hand.

Workers hold 8 entries of uint32, 32 bytes, unless a test says otherwise.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import Mesh, PartitionSpec

from jaxsparse.traffic import Collective, link_bytes, payload_bytes, traffic

N = 4
X = jnp.arange(8 * N, dtype=jnp.uint32)


class Text:
    """A compiled program of which only the text is known."""

    def __init__(self, text):
        self.as_text = lambda: text


def sharded(f):
    mesh = Mesh(jax.devices()[:N], ("w",))
    spec = PartitionSpec("w")
    return jax.jit(
        jax.shard_map(f, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    )


def compiled(f, x=X):
    return traffic(sharded(f).lower(x).compile())


def traced(f, x=X):
    return traffic(jax.make_jaxpr(sharded(f))(x))


def u32(op, size=32, times=1):
    return Collective(op, "uint32", size, times)


REDUCE, GATHER = u32("all-reduce"), u32("all-gather")
PERMUTE = u32("collective-permute")


def psum(x):
    return lax.psum(x, "w")


def gather(x):
    return lax.all_gather(x, "w").sum(0)


def permute(x):
    return lax.ppermute(x, "w", [(i, (i + 1) % N) for i in range(N)])


# What is counted


def five(x):
    x = permute(gather(psum(x)))
    part = lax.psum_scatter(x, "w", tiled=True)  # 8 entries in, 2 out
    return lax.all_to_all(x.reshape(N, 2) * part, "w", 0, 0).reshape(-1)


def test_the_five_collectives_under_shard_map_and_pmap():
    ops = "all-gather all-reduce all-to-all collective-permute reduce-scatter"
    want = {"": [u32(op) for op in ops.split()]}
    assert compiled(five) == want
    assert traced(five) == want
    stacked = X.reshape(N, 8)
    pmapped = jax.pmap(five, "w", devices=jax.devices()[:N])
    assert traffic(pmapped.lower(stacked).compile()) == want
    assert traffic(jax.make_jaxpr(pmapped)(stacked)) == want
    # up: 32 for each, but 24 for all-to-all; down: 3 * 32, 32, 24, 32 and 32 / 4.
    assert payload_bytes(want, N) == (32 * 4 + 24, 96 + 32 + 24 + 32 + 8)
    # ring: 3 * 32, 2 * 24, 24, 32, 24
    assert link_bytes(want, N) == 96 + 48 + 24 + 32 + 24


def test_nothing_is_sent():
    assert compiled(lambda x: x + 1) == traced(lambda x: x + 1) == {"": []}
    assert payload_bytes({"": []}, N) == (0, 0)
    assert link_bytes({"": []}, N) == 0
    vmapped = jax.vmap(lambda x: psum(x) + gather(x), axis_name="w")
    assert traffic(jax.make_jaxpr(vmapped)(X.reshape(N, 8))) == {"": []}


def test_constants_that_are_folded_and_not():
    def size(x):
        return x * lax.psum(1, "w") + lax.axis_size("w")

    assert traced(size) == {"": []}

    def array(x):
        return x + psum(jnp.uint32(3))

    assert compiled(array) == traced(array) == {"": [u32("all-reduce", 4)]}


def test_combined_all_reduce_has_an_entry_for_each_leaf():
    def f(x):
        leaves = [x, x[:3] * 2, x[:2].astype(jnp.float32), x[0]]
        a, b, c, d = psum(leaves)
        return a + b.sum() + c.sum().astype(jnp.uint32) + d

    want = [
        Collective("all-reduce", "float32", 8, 1),
        u32("all-reduce", 4),
        u32("all-reduce", 12),
        REDUCE,
    ]
    assert compiled(f) == traced(f) == {"": want}


def test_widening_shows():
    def send(x):
        return lax.all_gather(x, "w", tiled=True)

    def bits(x):
        words = send(lax.bitcast_convert_type(x, jnp.uint16))
        return lax.bitcast_convert_type(words, jnp.bfloat16)

    x = X.astype(jnp.bfloat16)
    assert traced(send, x) == {"": [Collective("all-gather", "bfloat16", 16, 1)]}
    assert compiled(send, x) == {"": [Collective("all-gather", "float32", 32, 1)]}
    assert compiled(bits, x) == {"": [Collective("all-gather", "uint16", 16, 1)]}


@pytest.mark.parametrize(
    "dtype, size", [("bool", 8), ("int8", 8), ("float16", 16), ("float8_e4m3fn", 8)]
)
def test_dtypes_of_a_jaxpr(dtype, size):
    jaxpr = jax.make_jaxpr(gather, axis_env=[("w", N)])(jnp.zeros(8, dtype))
    assert traffic(jaxpr) == {"": [Collective("all-gather", dtype, size, 1)]}


def test_a_jaxpr_inside_derivatives_and_vmaps():
    @jax.custom_vjp
    def f(x):
        return permute(x)

    f.defvjp(lambda x: (permute(x), None), lambda _, g: (gather(g),))

    def loss(x):
        with jax.named_scope("phases"):
            x = lax.cond(x[0] > 0, jax.remat(lambda x: jnp.sin(gather(x))), f, x)
        return jax.vmap(jnp.sum, axis_name="v")(f(x)[None])[0]

    f32 = [jnp.zeros(8, jnp.float32)]
    got = traffic(jax.make_jaxpr(loss, axis_env=[("w", N)])(*f32))
    permuted = Collective("collective-permute", "float32", 32, 1)
    gathered = Collective("all-gather", "float32", 32, 1)
    assert got == {"": [permuted], "phases[0]": [permuted], "phases[1]": [gathered]}
    got = traffic(jax.make_jaxpr(jax.grad(loss), axis_env=[("w", N)])(*f32))
    assert set(got) == {"", *(f"phases{i}[{j}]" for i in ("", ".1") for j in (0, 1))}

    # The vmapped axis is added up before the message is sent: 4 entries of 8 * 3.
    both = jax.vmap(lambda x: lax.psum(x, ("v", "w")), axis_name="v")
    jaxpr = jax.make_jaxpr(both, axis_env=[("w", N)])(jnp.zeros((3, 8), jnp.uint32))
    assert traffic(jaxpr) == {"": [REDUCE]}


# Loops


def test_loops_multiply():
    def inner(x, _):
        return lax.scan(lambda x, _: (permute(x), None), x, length=3)[0], None

    def f(x):
        x, _ = lax.scan(lambda x, _: (psum(x), None), x, length=5)
        x, _ = lax.scan(inner, x, length=2)
        return lax.fori_loop(2, 9, lambda i, x: gather(x) + 1, x)

    want = {"": [GATHER._replace(times=7), REDUCE._replace(times=5), PERMUTE]}
    want[""][-1] = PERMUTE._replace(times=6)
    assert sorted(want[""]) == compiled(f)[""] == traced(f)[""]
    assert payload_bytes(want, N) == (32 * 18, 32 * (3 * 7 + 5 + 6))
    # Before the optimiser has noted trip counts, and printed in another style.
    plain = sharded(f).lower(X).compiler_ir("hlo").as_hlo_text()
    assert traffic(Text(plain)) == {"": sorted(want[""])}


def test_loop_of_unknown_length():
    def f(x):
        with jax.named_scope("until"):
            return lax.while_loop(lambda x: x[0] < 9, lambda x: psum(x) + 1, x)

    for count in compiled, traced:
        with pytest.raises(ValueError, match=r"all-reduce in .*until.*lax.scan"):
            count(f)
    silent = lambda x: psum(lax.while_loop(lambda x: x[0] < 9, lambda x: x + 1, x))  # noqa: E731
    assert compiled(silent) == traced(silent) == {"": [REDUCE]}


# Conditionals


def test_paths_of_branches():
    sub = jax.jit(lambda x: lax.cond(x[1] > 7, gather, lambda x: x + 1, x))

    def phase_two(x):
        def step(x, _):
            with jax.named_scope("ladder"):
                return sub(x), None

        return lax.scan(step, sub(x), length=3)[0]

    def f(x):
        with jax.named_scope("finite"):
            x = psum(x)
            finite = lambda y: lax.cond(x[0] > 3, permute, lambda y: y + 2, y)  # noqa: E731
            x = jax.vmap(finite)(x[None])[0]
        with jax.named_scope("phases"):
            branches = [lambda x: x, lambda x: psum(x) * x, phase_two]
            x = lax.switch(x[2].astype(int), branches, x)
        return x + psum(lax.cond(x[0] > 3, lambda x: x, lambda x: x * 2, x))

    want = {
        "": [REDUCE, REDUCE],
        "finite[0]": [],
        "finite[1]": [PERMUTE],
        "phases[0]": [],
        "phases[1]": [REDUCE],
        "phases[2]": [],
        "phases[2]/cond[0]": [],
        "phases[2]/cond[1]": [GATHER],
        "phases[2]/ladder[0]": [],
        "phases[2]/ladder[1]": [GATHER._replace(times=3)],
    }
    got = compiled(f)
    assert got == traced(f) == want
    assert payload_bytes(got, N, finite=0, phases=0) == (64, 64)
    assert payload_bytes(got, N, finite=1, phases=1) == (128, 128)
    assert payload_bytes(got, N, finite=1, phases=2, cond=0, ladder=1) == (
        64 + 32 + 96,
        64 + 32 + 96 * 3,
    )
    with pytest.raises(ValueError, match=r"cond=0\.\.1, ladder=0\.\.1"):
        payload_bytes(got, N, finite=0, phases=2)


def test_conditionals_with_the_same_name():
    """XLA turns the order of independent conditionals round."""

    def f(x):
        index = x[0].astype(int)
        with jax.named_scope("s"):
            a = lax.switch(index, [lambda x: x, psum, permute], x)
        with jax.named_scope("s"):
            b = lax.switch(index, [lambda x: x, gather], x[:2])
        with jax.named_scope("s"):
            c = lax.switch(index, [permute, psum, lambda x: x], x * 2)
        return jnp.concatenate([c, b, a])

    want = {
        "": [],
        "s[0]": [],
        "s[1]": [u32("all-gather", 8)],
        "s.1[0]": [],
        "s.1[1]": [REDUCE],
        "s.1[2]": [PERMUTE],
        "s.2[0]": [PERMUTE],
        "s.2[1]": [REDUCE],
        "s.2[2]": [],
    }
    got = compiled(f)
    assert got == traced(f) == want
    assert payload_bytes(got, N, s=1) == (8 + 32 + 32, 24 + 32 + 32)
    assert payload_bytes(got, N, **{"s": 0, "s.1": 2}) == (64, 64)
    with pytest.raises(ValueError, match=r"Give s=0\.\.1 as"):
        payload_bytes(got, N, s=2)


# Spellings of HLO that the compiler here does not print


def test_predicated_conditional():
    program = Text("""
%yes (a: u32[8]) -> u32[8] {
  %a = u32[8]{0} parameter(0)
  ROOT %p = u32[8]{0} all-reduce(u32[8]{0} %a), to_apply=%add
}
%no (b: u32[8]) -> u32[8] {
  ROOT %b = u32[8]{0} parameter(0)
}
ENTRY %main (c: pred[], d: u32[8]) -> u32[8] {
  %c = pred[] parameter(0)
  %d = u32[8]{0} parameter(1)
  ROOT %e = u32[8] conditional(%c, %d, %d), true_computation=%yes, false_computation=%no
}""")
    assert traffic(program) == {"": [], "cond[0]": [], "cond[1]": [REDUCE]}


def test_asynchronous_tuples_calls_and_small_dtypes():
    program = Text("""HloModule step, is_scheduled=true
%wrapped (p: u32[16]) -> u32[4] {
  %p = u32[16]{0:T(128)} parameter(0)
  ROOT %s = u32[4]{0:T(128)} reduce-scatter(%p), dimensions={0}, to_apply=%add
}
callee {
  q = bf16[2,3]{1,0} parameter(0)
  ROOT r = bf16[2,3]{1,0} collective-permute(q), source_target_pairs={{0,1},{1,0}}
}
ENTRY %main (a: u32[16]) -> u32[4] {
  %a = u32[16]{0:T(128)} parameter(0)
  %b = bf16[2,3]{1,0:T(8,128)(2,1)} parameter(1)
  %c = pred[] parameter(2)
  %d = s4[5]{0:E(4)} parameter(3)
  %e = f8e5m2[5]{0} parameter(4)
  %f = (u32[16], bf16[2,3]) all-reduce-start(u32[16]{0:T(128)} %a, bf16[2,3] %b)
  %g = (u32[16], /*index=1*/bf16[2,3]) all-reduce-done((u32[16], bf16[2,3]) %f)
  %h = ((pred[], s4[5]), (pred[4], s4[20])) all-gather-start(%c, %d), dimensions={0}
  %i = (pred[4], s4[20]) all-gather-done(%h)
  %j = ((u32[16]), u32[4]) async-start(%a), calls=%wrapped
  %k = u32[4] async-done(%j), calls=%wrapped
  %l = (f8e5m2[5], f8e5m2[5]) all-to-all(%e, %e), replica_groups={{0,1}}
  ROOT %m = bf16[2,3] call(bf16[2,3] %b), to_apply=callee
}""")
    want = [
        Collective("all-reduce", "uint32", 64, 1),
        Collective("all-reduce", "bfloat16", 12, 1),
        Collective("all-gather", "bool", 1, 1),
        Collective("all-gather", "int4", 3, 1),
        Collective("reduce-scatter", "uint32", 64, 1),
        Collective("all-to-all", "float8_e5m2", 10, 1),
        Collective("collective-permute", "bfloat16", 12, 1),
    ]
    assert traffic(program) == {"": sorted(want)}


def test_what_is_not_compiled():
    with pytest.raises(ValueError, match="compile"):
        traffic(jax.jit(lambda x: x).lower(1.0))
    with pytest.raises(TypeError, match="compile"):
        traffic(jax.jit(lambda x: x))


# Bytes


@pytest.mark.parametrize(
    "op, payload, link",
    [  # of 10 bytes on each of 3 workers, twice
        ("all-reduce", (20, 20), 28),  # 40 / 3, up
        ("all-gather", (20, 40), 40),
        ("reduce-scatter", (20, 8), 14),  # 10 / 3 and 20 / 3, up
        ("all-to-all", (14, 14), 14),
        ("collective-permute", (20, 20), 20),
    ],
)
def test_bytes_are_rounded_up(op, payload, link):
    step = {"": [u32(op, 10, times=2)]}
    assert payload_bytes(step, 3) == payload
    assert link_bytes(step, 3) == link


def test_bytes_are_exact_beyond_floats():
    size = 2**60 + 4
    step = {"": [u32("all-reduce", size, times=1000)]}
    assert payload_bytes(step, 4) == (1000 * size, 1000 * size)
    assert link_bytes(step, 4) == 1500 * size


def test_branches_must_be_given_where_they_are_reached():
    step = {"": [], "a[0]": [], "a[1]": [], "a[1]/b[0]": [], "a[1]/b[2]": [REDUCE]}
    assert payload_bytes(step, N, a=0) == (0, 0)
    assert payload_bytes(step, N, a=1, b=2, elsewhere=3) == (32, 32)
    assert link_bytes(step, N, a=True, b=2) == 48
    with pytest.raises(ValueError, match=r"a=0\.\.1 as"):
        payload_bytes(step, N)
    with pytest.raises(ValueError, match=r"b=0\.\.2 as"):
        link_bytes(step, N, a=1)
    with pytest.raises(ValueError, match="num_workers"):
        link_bytes(step, 0, a=0)
    with pytest.raises(ValueError, match="ragged-all-to-all"):
        payload_bytes({"": [u32("ragged-all-to-all")]}, N)
