#include <metal_stdlib>
using namespace metal;
[[kernel, max_total_threads_per_threadgroup(32)]]
void reserved_names(
    device const float* half_ [[buffer(0)]],
    device float* storage_ [[buffer(1)]],
    constant float& fn_ [[buffer(2)]],
    uint3 tid_ [[thread_position_in_threadgroup]]) {
  threadgroup float device_[32];
  float template_[1];
  const float precision_ = half_[tid_.x];
  const float let_ = precision_ * fn_;
  const float was = let_;
  device_[tid_.x] = was;
  template_[0u] = 3.1415927f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint loop_ = 0u; loop_ < 1u; loop_++) {
    storage_[tid_.x + loop_] = device_[31u - tid_.x] + template_[0u];
  }
}
