#include <metal_stdlib>
using namespace metal;
[[kernel, max_total_threads_per_threadgroup(64)]]
void rms_norm(
    device const float* x [[buffer(0)]],
    device const float* weight [[buffer(1)]],
    device float* y [[buffer(2)]],
    constant uint& columns [[buffer(3)]],
    constant float& eps [[buffer(4)]],
    uint3 gid_ [[threadgroup_position_in_grid]],
    uint3 tid_ [[thread_position_in_threadgroup]]) {
  threadgroup float partial_[64];
  const uint was = gid_.x * columns;
  const uint t = tid_.x;
  const uint start = was;
  float squares = 0.0f;
  for (uint i = t; i < columns; i += 64u) {
    squares = squares + x[start + i] * x[start + i];
  }
  partial_[t] = squares;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 32u) {
    partial_[t] = partial_[t] + partial_[t + 32u];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 16u) {
    partial_[t] = partial_[t] + partial_[t + 16u];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 8u) {
    partial_[t] = partial_[t] + partial_[t + 8u];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 4u) {
    partial_[t] = partial_[t] + partial_[t + 4u];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 2u) {
    partial_[t] = partial_[t] + partial_[t + 2u];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (t < 1u) {
    partial_[t] = partial_[t] + partial_[t + 1u];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float rstd = rsqrt(partial_[0u] / float(columns) + eps);
  for (uint i_1 = t; i_1 < columns; i_1 += 64u) {
    y[start + i_1] = x[start + i_1] * rstd * weight[i_1];
  }
}
