extern "C" __global__ void __launch_bounds__(32) control_flow(const unsigned* __restrict__ x, unsigned* __restrict__ y, unsigned n) {
  const unsigned i = threadIdx.x + threadIdx.y * 8u + blockIdx.x * 32u + blockIdx.y * gridDim.x * 32u;
  unsigned total = 0u;
  bool both = i < n;
  if (both) {
    both = x[i] % 3u != 0u;
  }
  if (both) {
    const unsigned stop = x[i] % 9u;
    for (unsigned k = 2u; k < stop; k += 2u) {
      for (unsigned j = 0u; j < k; j++) {
        if ((j + k) % 2u == 0u || j > 3u) {
          total = total + j;
        } else {
          total = total + 100u;
        }
      }
    }
  } else {
    if (i < n) {
      const unsigned start = x[i];
      const unsigned was = start;
      unsigned n_1 = was;
      unsigned steps = 0u;
      while (n_1 > 1u) {
        n_1 = (n_1 % 2u == 0u) ? (n_1 / 2u) : (3u * n_1 + 1u);
        steps = steps + 1u;
      }
      const unsigned was_1 = steps;
      const unsigned was_2 = n_1;
      const unsigned count = was_1;
      const unsigned last = was_2;
      total = count * 1000u + last;
    }
  }
  int negative = 0;
  for (int k_1 = -3; k_1 < 4; k_1 += 3) {
    negative = negative + (k_1 * k_1 - 1);
  }
  const bool seen = i == 5u;
  if (!seen) {
    y[i] = total + unsigned(negative);
  } else {
    y[i] = 77u;
  }
}
