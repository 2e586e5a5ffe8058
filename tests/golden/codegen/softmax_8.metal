#include <metal_stdlib>
using namespace metal;
[[kernel, max_total_threads_per_threadgroup(32)]]
void softmax(
    device const half* a [[buffer(0)]],
    device const half* b [[buffer(1)]],
    device float* out [[buffer(2)]],
    device float* peak [[buffer(3)]],
    uint lane_ [[thread_index_in_simdgroup]],
    uint3 tid_ [[thread_position_in_threadgroup]]) {
  threadgroup half left[64];
  threadgroup half right[64];
  simdgroup_matrix<half, 8, 8> fa;
  simdgroup_matrix<half, 8, 8> fb;
  simdgroup_matrix<half, 8, 8> fp;
  simdgroup_matrix<float, 8, 8> scores;
  simdgroup_matrix<float, 8, 8> result;
  for (uint i = tid_.x; i < 64u; i += 32u) {
    const half was = a[i];
    const half was_1 = b[i];
    left[i] = was;
    right[i] = was_1;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_load(fa, left + 0u, 8, ulong2(0, 0), false);
  simdgroup_load(fb, right + 0u, 8, ulong2(0, 0), true);
  scores = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(scores, fa, fb, scores);
  float high = scores.thread_elements()[0];
  high = max(high, scores.thread_elements()[0]);
  high = max(high, scores.thread_elements()[1]);
  const float own = high;
  const float shuffled = simd_shuffle_xor(own, ushort(1u));
  const float own_1 = max(own, shuffled);
  const float shuffled_1 = simd_shuffle_xor(own_1, ushort(8u));
  high = max(own_1, shuffled_1);
  float total = 0.0f;
  scores.thread_elements()[0] = exp(scores.thread_elements()[0] - high);
  total = total + scores.thread_elements()[0];
  scores.thread_elements()[1] = exp(scores.thread_elements()[1] - high);
  total = total + scores.thread_elements()[1];
  const float own_2 = total;
  const float shuffled_2 = simd_shuffle_xor(own_2, ushort(1u));
  const float own_3 = own_2 + shuffled_2;
  const float shuffled_3 = simd_shuffle_xor(own_3, ushort(8u));
  total = own_3 + shuffled_3;
  scores.thread_elements()[0] = scores.thread_elements()[0] / total;
  scores.thread_elements()[1] = scores.thread_elements()[1] / total;
  if (lane_ / 8u % 2u * 4u + lane_ % 2u * 2u == 0u) {
    peak[lane_ / 16u * 4u + lane_ / 2u % 4u] = high;
  }
  fp.thread_elements()[0] = half(scores.thread_elements()[0]);
  fp.thread_elements()[1] = half(scores.thread_elements()[1]);
  simdgroup_load(fb, right + 0u, 8, ulong2(0, 0), false);
  result = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_multiply_accumulate(result, fp, fb, result);
  simdgroup_store(result, out + 0u, 8);
}
