template <class T> __device__ inline T subgroup_add_(T x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) { x += __shfl_xor_sync(0xffffffffu, x, mask); }
  return x;
}
template <class T> __device__ inline T subgroup_max_(T x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) { x = max(x, __shfl_xor_sync(0xffffffffu, x, mask)); }
  return x;
}
template <class T> __device__ inline T subgroup_min_(T x) {
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) { x = min(x, __shfl_xor_sync(0xffffffffu, x, mask)); }
  return x;
}
extern "C" __global__ void __launch_bounds__(64) subgroups(const float* __restrict__ x, float* __restrict__ y, unsigned* __restrict__ z) {
  __shared__ __align__(16) float partial_[64];
  const unsigned t = threadIdx.x;
  const float v = x[blockIdx.x * 64u + t];
  const float reduced = subgroup_add_(v);
  const float reduced_1 = subgroup_max_(v);
  const float reduced_2 = subgroup_min_(v);
  const float was = reduced;
  const float was_1 = reduced_1;
  const float was_2 = reduced_2;
  const float total = was;
  const float high = was_1;
  const float low = was_2;
  if ((threadIdx.x % 32u) == 0u) {
    partial_[(threadIdx.x / 32u)] = total;
  }
  __syncthreads();
  float everyone = 0.0f;
  for (unsigned k = 0u; k < (64u / 32u); k++) {
    everyone = everyone + partial_[k];
  }
  const float shuffled = __shfl_xor_sync(0xffffffffu, v, 1u);
  const float shuffled_1 = __shfl_sync(0xffffffffu, v, 0u);
  const float swapped = shuffled + shuffled_1;
  y[blockIdx.x * 64u + t] = everyone;
  const unsigned last = 32u - 1u;
  z[blockIdx.x * 64u + t] = unsigned((swapped == x[(blockIdx.x * 64u + t) ^ 1u] + x[blockIdx.x * 64u + (t & (~last))]));
  z[(blockIdx.x + gridDim.x) * 64u + t] = unsigned(high >= v && low <= v);
}
