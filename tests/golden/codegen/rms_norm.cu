extern "C" __global__ void __launch_bounds__(64) rms_norm(const float* __restrict__ x, const float* __restrict__ weight, float* __restrict__ y, unsigned columns, float eps) {
  __shared__ __align__(16) float partial_[64];
  const unsigned was = blockIdx.x * columns;
  const unsigned t = threadIdx.x;
  const unsigned start = was;
  float squares = 0.0f;
  for (unsigned i = t; i < columns; i += 64u) {
    squares = squares + x[start + i] * x[start + i];
  }
  partial_[t] = squares;
  __syncthreads();
  if (t < 32u) {
    partial_[t] = partial_[t] + partial_[t + 32u];
  }
  __syncthreads();
  if (t < 16u) {
    partial_[t] = partial_[t] + partial_[t + 16u];
  }
  __syncthreads();
  if (t < 8u) {
    partial_[t] = partial_[t] + partial_[t + 8u];
  }
  __syncthreads();
  if (t < 4u) {
    partial_[t] = partial_[t] + partial_[t + 4u];
  }
  __syncthreads();
  if (t < 2u) {
    partial_[t] = partial_[t] + partial_[t + 2u];
  }
  __syncthreads();
  if (t < 1u) {
    partial_[t] = partial_[t] + partial_[t + 1u];
  }
  __syncthreads();
  const float rstd = rsqrtf(partial_[0u] / float(columns) + eps);
  for (unsigned i_1 = t; i_1 < columns; i_1 += 64u) {
    y[start + i_1] = x[start + i_1] * rstd * weight[i_1];
  }
}
