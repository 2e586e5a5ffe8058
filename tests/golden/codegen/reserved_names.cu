extern "C" __global__ void __launch_bounds__(32) reserved_names(const float* __restrict__ half_, float* __restrict__ storage_, float fn_) {
  __shared__ __align__(16) float device_[32];
  float template_[1];
  const float precision_ = half_[threadIdx.x];
  const float let_ = precision_ * fn_;
  const float was = let_;
  device_[threadIdx.x] = was;
  template_[0u] = 3.1415927f;
  __syncthreads();
  for (unsigned loop_ = 0u; loop_ < 1u; loop_++) {
    storage_[threadIdx.x + loop_] = device_[31u - threadIdx.x] + template_[0u];
  }
}
