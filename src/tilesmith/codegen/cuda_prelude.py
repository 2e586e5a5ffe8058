"""The CUDA C++ that printed kernels rely on, in pieces. No header is included, so NVRTC needs none."""

from __future__ import annotations

F16 = """struct f16 {
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
"""
F16_ARITHMETIC = (
    "".join(
        f"__device__ inline {result} operator{op}(f16 a, f16 b) {{ return {result}(float(a) {op} float(b)); }}\n"
        for result, ops in (("f16", "+ - * /"), ("bool", "< <= > >= == !="))
        for op in ops.split()
    )
    + """__device__ inline f16 operator-(f16 a) { return f16(-float(a)); }
__device__ inline f16 fmaxf(f16 a, f16 b) { return f16(fmaxf(float(a), float(b))); }
__device__ inline f16 fminf(f16 a, f16 b) { return f16(fminf(float(a), float(b))); }
__device__ inline f16 fabsf(f16 a) { return f16(fabsf(float(a))); }
__device__ inline f16 fmaf(f16 a, f16 b, f16 c) { return f16(fmaf(float(a), float(b), float(c))); }
"""
)
BF16 = """struct bf16 {
  unsigned short bits;
  bf16() = default;
  __device__ explicit bf16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ explicit operator float() const { return __uint_as_float(unsigned(bits) << 16); }
  __device__ explicit operator unsigned() const { return unsigned(float(*this)); }
  __device__ explicit operator int() const { return int(float(*this)); }
};
"""
VECTOR = """template <class T, int N> struct alignas(sizeof(T) * N) Vec {
  T lane[N];
  Vec() = default;
  __device__ explicit Vec(T x) {
#pragma unroll
    for (int k = 0; k < N; ++k) { lane[k] = x; }
  }
  __device__ Vec(T x, T y) : lane{x, y} {}
  __device__ Vec(T x, T y, T z, T w) : lane{x, y, z, w} {}
  template <class U> __device__ explicit Vec(const Vec<U, N>& x) {
#pragma unroll
    for (int k = 0; k < N; ++k) { lane[k] = T(x[k]); }
  }
  __device__ T operator[](int k) const { return lane[k]; }
  __device__ void set(int k, T x) { lane[k] = x; }
};
"""
_VECTOR16 = """template <int N> struct alignas(2 * N) Vec<{t}, N> {{
  unsigned word[N / 2];
  Vec() = default;
  __device__ explicit Vec({t} x) {{
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {{ word[k] = unsigned(x.bits) * 0x10001u; }}
  }}
  __device__ Vec({t} x, {t} y) : word{{unsigned(x.bits) | unsigned(y.bits) << 16}} {{}}
  __device__ Vec({t} x, {t} y, {t} z, {t} w)
      : word{{unsigned(x.bits) | unsigned(y.bits) << 16, unsigned(z.bits) | unsigned(w.bits) << 16}} {{}}
  template <class U> __device__ explicit Vec(const Vec<U, N>& x) {{
#pragma unroll
    for (int k = 0; k < N / 2; ++k) {{
      asm("cvt.rn.{t}x2.f32 %0, %1, %2;" : "=r"(word[k]) : "f"(float(x[2 * k + 1])), "f"(float(x[2 * k])));
    }}
  }}
  __device__ {t} operator[](int k) const {{
    {t} x;
    x.bits = static_cast<unsigned short>(word[k / 2] >> k % 2 * 16);
    return x;
  }}
  __device__ void set(int k, {t} x) {{
    word[k / 2] = k % 2 ? (word[k / 2] & 0xffffu) | unsigned(x.bits) << 16 : (word[k / 2] & 0xffff0000u) | x.bits;
  }}
}};
"""
READ = """template <int BYTES> struct Word_;
template <> struct Word_<4> { using Type = unsigned; };
template <> struct Word_<8> { using Type = uint2; };
template <> struct Word_<16> { using Type = uint4; };
template <class V> __device__ inline V read_(const V* p) {
  union {
    typename Word_<sizeof(V)>::Type word;
    V value;
  } bits;
  bits.word = *reinterpret_cast<const typename Word_<sizeof(V)>::Type*>(p);
  return bits.value;
}
"""
_LANES = """{{
  Vec<T, N> out;
#pragma unroll
  for (int k = 0; k < N; ++k) {{ out.set(k, {value}); }}
  return out;
}}
"""
EXP2 = """__device__ inline float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
"""
PACK_F16 = """__device__ inline unsigned pack_f16_(Vec<float, 2> x) {
  unsigned y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(x[1]), "f"(x[0]));
  return y;
}
"""
UNPACK_F16 = """__device__ inline Vec<float, 2> unpack_f16_(unsigned x) {
  float low, high;
  asm("{ .reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b; }"
      : "=f"(low), "=f"(high) : "r"(x));
  return Vec<float, 2>(low, high);
}
"""
BITCAST = """template <class To, class From> __device__ inline To bitcast_(From x) {
  union {
    From from;
    To to;
  } bits;
  bits.from = x;
  return bits.to;
}
"""
SUBGROUP = """template <class T> __device__ inline T subgroup_add_(T x) {
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
"""
FRAGMENTS = """template <class T> struct FragmentA { unsigned r[4]; };
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
"""
_MMA = """__device__ inline void mma_(FragmentC& c, const FragmentA<{t}>& a, const FragmentB<{t}>& b) {{
#pragma unroll
  for (int k = 0; k < 2; ++k) {{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.{t}.{t}.f32 "
        "{{%0, %1, %2, %3}}, {{%4, %5, %6, %7}}, {{%8, %9}}, {{%0, %1, %2, %3}};"
        : "+f"(c.r[4 * k]), "+f"(c.r[4 * k + 1]), "+f"(c.r[4 * k + 2]), "+f"(c.r[4 * k + 3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[2 * k]), "r"(b.r[2 * k + 1]));
  }}
}}
__device__ inline void convert_(FragmentA<{t}>& a, const FragmentC& c) {{
#pragma unroll
  for (int k = 0; k < 4; ++k) {{
    asm("cvt.rn.{t}x2.f32 %0, %1, %2;" : "=r"(a.r[k]) : "f"(c.r[2 * k + 1]), "f"(c.r[2 * k]));
  }}
}}
"""
LOAD_COLUMNS = """__device__ inline void load_columns_(FragmentC& f, const float* p, unsigned stride) {
#pragma unroll
  for (unsigned k = 0; k < 8; ++k) {
    f.r[k] = p[(lane_() % 4 * 2 + k % 2 + k / 4 * 8) * stride + lane_() / 4 + k / 2 % 2 * 8];
  }
}
"""
STORE_F16 = """__device__ inline void store_(const FragmentC& f, f16* p, unsigned stride) {
#pragma unroll
  for (unsigned k = 0; k < 8; k += 2) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(f.r[k + 1]), "f"(f.r[k]));
    *reinterpret_cast<unsigned*>(p + place_(lane_(), k, stride)) = pair;
  }
}
"""
_ROW_REDUCE = """__device__ inline float both_OP_(float a, float b) { return BOTH; }
__device__ inline void row_OP_(FragmentC& t, const FragmentC& s) {
#pragma unroll
  for (int h = 0; h < 4; h += 2) {
    float x = both_OP_(both_OP_(s.r[h], s.r[h + 1]), both_OP_(s.r[h + 4], s.r[h + 5]));
    x = both_OP_(x, __shfl_xor_sync(0xffffffffu, x, 1));
    x = both_OP_(x, __shfl_xor_sync(0xffffffffu, x, 2));
    t.r[h] = t.r[h + 1] = t.r[h + 4] = t.r[h + 5] = x;
  }
}
"""


def vector16(dtype: str) -> str:
    """Vectors of f16 or bf16, kept in 32-bit words: nvcc would load 16-bit lanes one by one."""
    return _VECTOR16.format(t=dtype)


def mma(dtype: str) -> str:
    """The products of fragments of f16 or bf16."""
    return _MMA.format(t=dtype)


def row_reduce(op: str) -> str:
    """A reduction of an accumulator's rows: `add` or `max`."""
    return _ROW_REDUCE.replace("OP", op).replace("BOTH", {"add": "a + b", "max": "fmaxf(a, b)"}[op])


def vector_operator(op: str) -> str:
    """`op` of two vectors, lane by lane."""
    head = f"template <class T, int N> __device__ inline Vec<T, N> operator{op}(Vec<T, N> a, Vec<T, N> b) "
    return head + _LANES.format(value=f"T(a[k] {op} b[k])")


def vector_sign(op: str) -> str:
    """`op` of one vector, lane by lane."""
    return f"template <class T, int N> __device__ inline Vec<T, N> operator{op}(Vec<T, N> a) " + _LANES.format(
        value=f"T({op}a[k])"
    )


def vector_function(name: str, arity: int) -> str:
    """A function of vectors, lane by lane."""
    letters = "abc"[:arity]
    args = ", ".join(f"Vec<T, N> {x}" for x in letters)
    value = f"{name}({', '.join(f'{x}[k]' for x in letters)})"
    return f"template <class T, int N> __device__ inline Vec<T, N> {name}({args}) " + _LANES.format(value=value)


DOT = """template <class T, int N> __device__ inline T dot_(Vec<T, N> a, Vec<T, N> b) {
  T sum = T(a[0] * b[0]);
#pragma unroll
  for (int k = 1; k < N; ++k) { sum = T(sum + a[k] * b[k]); }
  return sum;
}
"""
