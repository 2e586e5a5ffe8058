#include <metal_stdlib>
using namespace metal;
[[kernel, max_total_threads_per_threadgroup(64)]]
void subgroups(
    device const float* x [[buffer(0)]],
    device float* y [[buffer(1)]],
    device uint* z [[buffer(2)]],
    uint3 gid_ [[threadgroup_position_in_grid]],
    uint3 groups_ [[threadgroups_per_grid]],
    uint lane_ [[thread_index_in_simdgroup]],
    uint subgroup_ [[simdgroup_index_in_threadgroup]],
    uint subgroup_size_ [[threads_per_simdgroup]],
    uint3 tid_ [[thread_position_in_threadgroup]]) {
  threadgroup float partial_[64];
  const uint t = tid_.x;
  const float v = x[gid_.x * 64u + t];
  const float reduced = simd_sum(v);
  const float reduced_1 = simd_max(v);
  const float reduced_2 = simd_min(v);
  const float was = reduced;
  const float was_1 = reduced_1;
  const float was_2 = reduced_2;
  const float total = was;
  const float high = was_1;
  const float low = was_2;
  if (lane_ == 0u) {
    partial_[subgroup_] = total;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float everyone = 0.0f;
  for (uint k = 0u; k < (64u / subgroup_size_); k++) {
    everyone = everyone + partial_[k];
  }
  const float shuffled = simd_shuffle_xor(v, ushort(1u));
  const float shuffled_1 = simd_shuffle(v, ushort(0u));
  const float swapped = shuffled + shuffled_1;
  y[gid_.x * 64u + t] = everyone;
  const uint last = subgroup_size_ - 1u;
  z[gid_.x * 64u + t] = uint((swapped == x[(gid_.x * 64u + t) ^ 1u] + x[gid_.x * 64u + (t & (~last))]));
  z[(gid_.x + groups_.x) * 64u + t] = uint(high >= v && low <= v);
}
