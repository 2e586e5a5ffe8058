struct f16 {
  unsigned short bits;
  f16() = default;
  __device__ explicit f16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
  __device__ explicit operator unsigned() const { return unsigned(float(*this)); }
  __device__ explicit operator int() const { return int(float(*this)); }
};
template <class T> struct FragmentA { unsigned r[4]; };
template <class T> struct FragmentB { unsigned r[4]; };
struct FragmentC { float r[8]; };
__device__ inline unsigned lane_() {
  unsigned n;
  asm("mov.u32 %0, %%laneid;" : "=r"(n));
  return n;
}
__device__ inline unsigned shared_(const void* p) {
  unsigned a;
  asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p));
  return a;
}
__device__ inline void ldmatrix_(unsigned* r, const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_(p)) : "memory");
}
__device__ inline void ldmatrix_trans_(unsigned* r, const void* p) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_(p)) : "memory");
}
template <class T> __device__ inline unsigned pair_(T low, T high) {
  return unsigned(low.bits) | unsigned(high.bits) << 16;
}
template <class T> __device__ inline void fill_(unsigned* r, T x) {
#pragma unroll
  for (int k = 0; k < 4; ++k) { r[k] = pair_(x, x); }
}
template <class T> __device__ inline void fill_(FragmentA<T>& f, T x) { fill_(f.r, x); }
template <class T> __device__ inline void fill_(FragmentB<T>& f, T x) { fill_(f.r, x); }
__device__ inline void fill_(FragmentC& f, float x) {
#pragma unroll
  for (int k = 0; k < 8; ++k) { f.r[k] = x; }
}
template <bool TRANSPOSED, class T> __device__ inline void load_shared_(FragmentA<T>& f, const T* p, unsigned stride) {
  const unsigned n = lane_();
  if (TRANSPOSED) {
    ldmatrix_trans_(f.r, p + (n % 8 + n / 16 * 8) * stride + n / 8 % 2 * 8);
  } else {
    ldmatrix_(f.r, p + n % 16 * stride + n / 16 * 8);
  }
}
template <bool TRANSPOSED, class T> __device__ inline void load_shared_(FragmentB<T>& f, const T* p, unsigned stride) {
  const unsigned n = lane_();
  if (TRANSPOSED) {
    ldmatrix_(f.r, p + (n % 8 + n / 16 * 8) * stride + n / 8 % 2 * 8);
  } else {
    ldmatrix_trans_(f.r, p + n % 16 * stride + n / 16 * 8);
  }
}
template <bool TRANSPOSED, class T> __device__ inline void load_(FragmentA<T>& f, const T* p, unsigned stride) {
  const unsigned n = lane_();
#pragma unroll
  for (unsigned k = 0; k < 4; ++k) {
    const unsigned row = n / 4 + k % 2 * 8, column = n % 4 * 2 + k / 2 * 8;
    f.r[k] = TRANSPOSED ? pair_(p[column * stride + row], p[(column + 1) * stride + row])
                        : pair_(p[row * stride + column], p[row * stride + column + 1]);
  }
}
template <bool TRANSPOSED, class T> __device__ inline void load_(FragmentB<T>& f, const T* p, unsigned stride) {
  const unsigned n = lane_();
#pragma unroll
  for (unsigned k = 0; k < 4; ++k) {
    const unsigned row = n % 4 * 2 + k % 2 * 8, column = n / 4 + k / 2 * 8;
    f.r[k] = TRANSPOSED ? pair_(p[column * stride + row], p[column * stride + row + 1])
                        : pair_(p[row * stride + column], p[(row + 1) * stride + column]);
  }
}
__device__ inline unsigned place_(unsigned n, unsigned k, unsigned stride) {
  return (n / 4 + k / 2 % 2 * 8) * stride + n % 4 * 2 + k / 4 * 8;
}
__device__ inline void load_(FragmentC& f, const float* p, unsigned stride) {
#pragma unroll
  for (unsigned k = 0; k < 8; k += 2) {
    const float2 x = *reinterpret_cast<const float2*>(p + place_(lane_(), k, stride));
    f.r[k] = x.x;
    f.r[k + 1] = x.y;
  }
}
__device__ inline void store_(const FragmentC& f, float* p, unsigned stride) {
#pragma unroll
  for (unsigned k = 0; k < 8; k += 2) {
    *reinterpret_cast<float2*>(p + place_(lane_(), k, stride)) = make_float2(f.r[k], f.r[k + 1]);
  }
}
__device__ inline void mma_(FragmentC& c, const FragmentA<f16>& a, const FragmentB<f16>& b) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c.r[4 * k]), "+f"(c.r[4 * k + 1]), "+f"(c.r[4 * k + 2]), "+f"(c.r[4 * k + 3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * k]), "r"(b.r[2 * k + 1]));
  }
}
__device__ inline void convert_(FragmentA<f16>& a, const FragmentC& c) {
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(a.r[k]) : "f"(c.r[2 * k + 1]), "f"(c.r[2 * k]));
  }
}
extern "C" __global__ void __launch_bounds__(32) softmax(const f16* __restrict__ a, const f16* __restrict__ b, float* __restrict__ out, float* __restrict__ peak) {
  __shared__ __align__(16) f16 left[256];
  __shared__ __align__(16) f16 right[256];
  FragmentA<f16> fa;
  FragmentB<f16> fb;
  FragmentA<f16> fp;
  FragmentC scores;
  FragmentC result;
  for (unsigned i = threadIdx.x; i < 256u; i += 32u) {
    const f16 was = a[i];
    const f16 was_1 = b[i];
    left[i] = was;
    right[i] = was_1;
  }
  __syncthreads();
  load_shared_<false>(fa, left + 0u, 16u);
  load_shared_<true>(fb, right + 0u, 16u);
  fill_(scores, 0.0f);
  mma_(scores, fa, fb);
  float high = scores.r[0];
  high = fmaxf(high, scores.r[0]);
  high = fmaxf(high, scores.r[1]);
  high = fmaxf(high, scores.r[4]);
  high = fmaxf(high, scores.r[5]);
  const float own = high;
  const float shuffled = __shfl_xor_sync(0xffffffffu, own, 1u);
  const float own_1 = fmaxf(own, shuffled);
  const float shuffled_1 = __shfl_xor_sync(0xffffffffu, own_1, 2u);
  high = fmaxf(own_1, shuffled_1);
  float total = 0.0f;
  scores.r[0] = expf(scores.r[0] - high);
  total = total + scores.r[0];
  scores.r[1] = expf(scores.r[1] - high);
  total = total + scores.r[1];
  scores.r[4] = expf(scores.r[4] - high);
  total = total + scores.r[4];
  scores.r[5] = expf(scores.r[5] - high);
  total = total + scores.r[5];
  const float own_2 = total;
  const float shuffled_2 = __shfl_xor_sync(0xffffffffu, own_2, 1u);
  const float own_3 = own_2 + shuffled_2;
  const float shuffled_3 = __shfl_xor_sync(0xffffffffu, own_3, 2u);
  total = own_3 + shuffled_3;
  scores.r[0] = scores.r[0] / total;
  scores.r[1] = scores.r[1] / total;
  scores.r[4] = scores.r[4] / total;
  scores.r[5] = scores.r[5] / total;
  if ((threadIdx.x % 32u) % 4u * 2u == 0u) {
    peak[(threadIdx.x % 32u) / 4u] = high;
  }
  high = scores.r[2];
  high = fmaxf(high, scores.r[2]);
  high = fmaxf(high, scores.r[3]);
  high = fmaxf(high, scores.r[6]);
  high = fmaxf(high, scores.r[7]);
  const float own_4 = high;
  const float shuffled_4 = __shfl_xor_sync(0xffffffffu, own_4, 1u);
  const float own_5 = fmaxf(own_4, shuffled_4);
  const float shuffled_5 = __shfl_xor_sync(0xffffffffu, own_5, 2u);
  high = fmaxf(own_5, shuffled_5);
  total = 0.0f;
  scores.r[2] = expf(scores.r[2] - high);
  total = total + scores.r[2];
  scores.r[3] = expf(scores.r[3] - high);
  total = total + scores.r[3];
  scores.r[6] = expf(scores.r[6] - high);
  total = total + scores.r[6];
  scores.r[7] = expf(scores.r[7] - high);
  total = total + scores.r[7];
  const float own_6 = total;
  const float shuffled_6 = __shfl_xor_sync(0xffffffffu, own_6, 1u);
  const float own_7 = own_6 + shuffled_6;
  const float shuffled_7 = __shfl_xor_sync(0xffffffffu, own_7, 2u);
  total = own_7 + shuffled_7;
  scores.r[2] = scores.r[2] / total;
  scores.r[3] = scores.r[3] / total;
  scores.r[6] = scores.r[6] / total;
  scores.r[7] = scores.r[7] / total;
  if ((threadIdx.x % 32u) % 4u * 2u == 0u) {
    peak[(threadIdx.x % 32u) / 4u + 8u] = high;
  }
  convert_(fp, scores);
  load_shared_<false>(fb, right + 0u, 16u);
  fill_(result, 0.0f);
  mma_(result, fp, fb);
  store_(result, out + 0u, 16u);
}
