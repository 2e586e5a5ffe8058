#include <metal_stdlib>
using namespace metal;
[[kernel, max_total_threads_per_threadgroup(32)]]
void control_flow(
    device const uint* x [[buffer(0)]],
    device uint* y [[buffer(1)]],
    constant uint& n [[buffer(2)]],
    uint3 gid_ [[threadgroup_position_in_grid]],
    uint3 groups_ [[threadgroups_per_grid]],
    uint3 tid_ [[thread_position_in_threadgroup]]) {
  const uint i = tid_.x + tid_.y * 8u + gid_.x * 32u + gid_.y * groups_.x * 32u;
  uint total = 0u;
  bool both = i < n;
  if (both) {
    both = x[i] % 3u != 0u;
  }
  if (both) {
    const uint stop = x[i] % 9u;
    for (uint k = 2u; k < stop; k += 2u) {
      for (uint j = 0u; j < k; j++) {
        if ((j + k) % 2u == 0u || j > 3u) {
          total = total + j;
        } else {
          total = total + 100u;
        }
      }
    }
  } else {
    if (i < n) {
      const uint start = x[i];
      const uint was = start;
      uint n_1 = was;
      uint steps = 0u;
      while (n_1 > 1u) {
        n_1 = (n_1 % 2u == 0u) ? (n_1 / 2u) : (3u * n_1 + 1u);
        steps = steps + 1u;
      }
      const uint was_1 = steps;
      const uint was_2 = n_1;
      const uint count = was_1;
      const uint last = was_2;
      total = count * 1000u + last;
    }
  }
  int negative = 0;
  for (int k_1 = -3; k_1 < 4; k_1 += 3) {
    negative = negative + (k_1 * k_1 - 1);
  }
  const bool seen = i == 5u;
  if (!seen) {
    y[i] = total + uint(negative);
  } else {
    y[i] = 77u;
  }
}
