"""Collectives of programs that eight CPU devices really run, and of the forms that other compilers
write.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.parallel.collectives import Traffic, overlapped_share, traffic
from jaxrl_llm.parallel.mesh import MeshConfig, build_mesh


def compiled_text(function, *arguments):
  return jax.jit(function).lower(*arguments).compile().as_text()


@pytest.fixture(scope='module')
def cut():
  mesh = build_mesh(MeshConfig())
  return lambda shape, *axes: jax.ShapeDtypeStruct(
    shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*axes))
  )


def test_a_product_over_the_cut_dimension_is_one_reduction(cut):
  found = traffic(
    compiled_text(lambda x, w: x @ w, cut((16, 32), None, 'fsdp'), cut((32, 4), 'fsdp'))
  )
  assert found == {'all-reduce': Traffic(1, 16 * 4 * 4, 'f32[16,4]')}


@pytest.mark.parametrize('layers', [1, 5])
def test_a_loop_of_known_length_counts_that_often(cut, layers):
  def whole(w):
    return jax.lax.with_sharding_constraint(w, cut((8, 8)).sharding)

  def chain(x, ws):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ whole(w)), None), x, ws)[0]

  found = traffic(compiled_text(chain, cut((16, 8), 'fsdp'), cut((layers, 8, 8), None, 'fsdp')))
  assert set(found) == {'all-gather'} and found['all-gather'][:2] == (layers, layers * 8 * 8 * 4)


def test_a_loop_of_unknown_length_counts_once(cut):
  def loop(x, w, n):
    def step(_, x):
      return jnp.tanh(x @ w)

    return jax.lax.fori_loop(0, n, step, x)

  text = compiled_text(loop, cut((16, 32), None, 'fsdp'), cut((32, 32), 'fsdp'), np.int32(3))
  assert sum(kind.count for kind in traffic(text).values()) in (1, 2)


def test_nothing_is_sent_where_nothing_is_cut():
  assert traffic(compiled_text(lambda x: x @ x, jnp.ones((4, 4)))) == {}


PROGRAM = """HloModule jit_f
%fused_computation (p: bf16[8]) -> bf16[2] {
  %p = bf16[8]{0} parameter(0)
  %r = bf16[8]{0} all-reduce(%p), to_apply=%add
  ROOT %s = bf16[2]{0} dynamic-slice(%r)
}

%all-reduce-scatter.3 (p: bf16[8]) -> bf16[2] {
  %p.1 = bf16[8]{0} parameter(0)
  ROOT %r.1 = bf16[8]{0:T(256)} all-reduce(%p.1), to_apply=%add
}

ENTRY %main (a: bf16[4,2]) -> bf16[2] {
  %g = (bf16[4,2]{1,0}, bf16[16,2]{1,0}) all-gather-start(%a), dimensions={0}
  %d = bf16[16,2]{1,0} all-gather-done(%g)
  %f = bf16[2]{0} fusion(%d), kind=kLoop, calls=%fused_computation
  ROOT %h = bf16[2]{0} fusion(%f), kind=kCustom, calls=%all-reduce-scatter.3
}
"""


def test_starts_count_their_result_and_fused_reductions_are_found():
  assert traffic(PROGRAM) == {
    'all-gather': Traffic(1, 16 * 2 * 2, 'bf16[16,2]'),
    'reduce-scatter': Traffic(1, 16, 'bf16[8]'),
    'all-reduce': Traffic(1, 16, 'bf16[8]'),
  }


TPU_LOOP = """HloModule jit_f
%condition (p.0: (s32[], bf16[8])) -> pred[] {
  %n = s32[]{:T(128)} constant(24)
  %p.0 = (s32[], bf16[8]) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p.0), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %n), direction=LT, backend_config={"flag_configs":[]}
}

%starts (p.1: bf16[8]) -> bf16[64] {
  %g.1 = bf16[64]{0} all-gather(%p.1), channel_id=2, dimensions={0}
  ROOT %c.1 = bf16[64]{0} custom-call(%g.1)
}

%ends (p.2: bf16[8]) -> bf16[64] {
  %g.2 = bf16[64]{0} all-gather(%p.2), channel_id=2, dimensions={0}
  ROOT %c.2 = bf16[64]{0} custom-call(%g.2)
}

%body (p.3: (s32[], bf16[8])) -> (s32[], bf16[8]) {
  %f.1 = bf16[64]{0} fusion(%x), kind=kCustom, calls=%starts
  %f.2 = bf16[64]{0} fusion(%f.1), kind=kCustom, calls=%ends
  %r = bf16[8]{0} all-reduce(%y), channel_id=3, to_apply=%add
}

ENTRY %main (a: bf16[8]) -> bf16[8] {
  %w = (s32[], bf16[8]) while(%t), condition=%condition, body=%body
}
"""


def test_a_tpus_loop_counts_what_its_condition_says_and_parts_of_one_transfer_once():
  assert traffic(TPU_LOOP) == {
    'all-gather': Traffic(24, 24 * 64 * 2, 'bf16[64]'),
    'all-reduce': Traffic(24, 24 * 8 * 2, 'bf16[8]'),
  }
  unknown = TPU_LOOP.replace('constant(24)', 'parameter(1)')
  assert traffic(unknown) == {
    'all-gather': Traffic(1, 64 * 2, 'bf16[64]'),
    'all-reduce': Traffic(1, 8 * 2, 'bf16[8]'),
  }


SCATTERS = """HloModule jit_f
ENTRY %main (a: f32[64,8], b: f32[32]) -> f32[8,8] {
  %a = f32[64,8]{1,0} parameter(0)
  %b = f32[32]{0} parameter(1)
  %p = f32[8,8]{1,0} reduce-scatter(%a), channel_id=1, dimensions={0}, to_apply=%add
  %s = ((f32[64,8]{1,0}, f32[32]{0}), (f32[8,8]{1,0}, f32[4]{0})) reduce-scatter-start(%a, %b), \
to_apply=%add
  %r = (f32[64,8]{1,0}, f32[32]{0}) all-reduce-start(%a, %b), channel_id=2, to_apply=%add
  %m = (f32[32]{0}, f32[32]{0}, u32[], u32[]) collective-permute-start(%b), channel_id=3
}
"""


def test_a_scatter_counts_what_goes_in_and_starts_of_several_arrays_all_of_them():
  whole = 64 * 8 * 4
  assert traffic(SCATTERS) == {
    'reduce-scatter': Traffic(2, whole + whole + 32 * 4, 'f32[64,8]'),
    'all-reduce': Traffic(1, whole + 32 * 4, 'f32[64,8]'),
    'collective-permute': Traffic(1, 32 * 4, 'f32[32]'),
  }


SLICES = """HloModule jit_f, num_partitions=8
ENTRY %main (a: bf16[128,1024]) -> bf16[128,1024] {
  %s = (bf16[128,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) send(%b, %t), \
channel_id=2, is_host_transfer=true, frontend_attributes={_xla_host_transfer_handler_name=\
"xla_megascale_runtime",_xla_megascale_target="{1,2}x{0:7}",_xla_megascale_transfer_type="ALL_REDUCE"}
  %r = (bf16[128,8,128]{2,1,0:T(8,128)(2,1)}, u32[], token[]) recv(%t), \
channel_id=1, is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %d = token[] send-done(%s), channel_id=2, is_host_transfer=true
}
"""


def test_what_crosses_slices_counts_apart_and_once():
  assert traffic(SLICES) == {
    'all-reduce between slices': Traffic(1, 128 * 8 * 128 * 2, 'bf16[128,8,128]')
  }


def test_what_the_compiler_says_of_a_loop_goes_before_its_condition():
  once = TPU_LOOP.replace('body=%body', 'body=%body, backend_config={"known_trip_count":{"n":"1"}}')
  assert {kind: found.count for kind, found in traffic(once).items()} == {
    'all-gather': 1,
    'all-reduce': 1,
  }


SCHEDULE = """HloModule jit_f
%product (p: f32[8,8]) -> f32[8,8] {
  %p = f32[8,8]{1,0} parameter(0)
  ROOT %d.1 = f32[8,8]{1,0} dot(%p, %p), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (a: f32[2,8]) -> f32[8,8] {
  %g.1 = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%a), dimensions={0}
  %f = f32[8,8]{1,0} fusion(%w), kind=kCustom, calls=%product
  %e.1 = f32[8,8]{1,0} all-gather-done(%g.1)
  %g.2 = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%b), dimensions={0}
  %s = f32[8,8]{1,0} add(%f, %e.1)
  %e.2 = f32[8,8]{1,0} all-gather-done(%g.2)
  ROOT %r = f32[8,8]{1,0} all-reduce(%s), to_apply=%add
}
"""


def test_a_transfer_with_a_product_between_its_start_and_its_end_is_overlapped():
  whole = 8 * 8 * 4
  found = traffic(SCHEDULE)
  assert found == {
    'all-gather': Traffic(2, 2 * whole, 'f32[8,8]', overlapped=whole),
    'all-reduce': Traffic(1, whole, 'f32[8,8]'),
  }
  assert overlapped_share(found) == pytest.approx(1 / 3) and overlapped_share({}) == 1
  behind = SCHEDULE.replace('all-gather-done(%g.1)', 'all-gather-done(%g.3)')
  assert traffic(behind)['all-gather'].overlapped == 0


def test_a_tpus_fusion_of_a_transfer_and_a_product_overlaps_them():
  product = '  %v = bf16[64]{0} convolution(%p.1, %p.1), dim_labels=bf_oi->bf\n'
  beside = TPU_LOOP.replace('  ROOT %c.1 =', product + '  ROOT %c.1 =')
  assert traffic(beside)['all-gather'] == Traffic(24, 24 * 64 * 2, 'bf16[64]', 24 * 64 * 2)
