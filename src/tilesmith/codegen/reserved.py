"""Names that a printed kernel may not use: keywords and built-in names of C++, CUDA, Metal and WGSL."""

_CPP = """
alignas alignof and and_eq asm auto bitand bitor bool break case catch char char8_t char16_t char32_t class compl
concept const consteval constexpr constinit const_cast continue co_await co_return co_yield decltype default delete do
double dynamic_cast else enum explicit export extern false float for friend goto if inline int long mutable namespace
new noexcept not not_eq nullptr operator or or_eq private protected public register reinterpret_cast requires return
short signed sizeof static static_assert static_cast struct switch template this thread_local throw true try typedef
typeid typename union unsigned using virtual void volatile wchar_t while xor xor_eq main std size_t NULL
"""
_CUDA = """
threadIdx blockIdx blockDim gridDim warpSize f16 bf16 Vec FragmentA FragmentB FragmentC
"""
_METAL = """
kernel vertex fragment device constant threadgroup thread metal half bfloat uint ushort uchar ulong ptrdiff_t atomic
sampler texture mem_flags access as_type simdgroup_matrix simd_sum simd_max simd_min simd_shuffle simd_shuffle_xor
quad precise fast float2 float4 half2 half4 bfloat2 bfloat4 int2 int4 uint2 uint3 uint4 ulong2
threadgroup_barrier simdgroup_barrier simdgroup_load simdgroup_store simdgroup_multiply_accumulate
make_filled_simdgroup_matrix
"""
_WGSL = """
alias const_assert continuing diagnostic discard enable fallthrough fn let loop override var array atomic mat2x2
mat2x3 mat2x4 mat3x2 mat3x3 mat3x4 mat4x2 mat4x3 mat4x4 ptr vec2 vec3 vec4 i32 u32 f32 bitcast select workgroupBarrier
abstract active as asm async attribute await become cast cbuffer checked coherent column_major common compile
compile_fragment crate debugger default delegate delete demote do enum event explicit extends extern external f64
filter final finally from function get global goto groupshared highp impl implements import in inline instanceof
interface layout lowp macro match mediump meta mod module move mut new nil noinline nointerpolation null of package
packoffset partial pass patch pixelfragment point precise premerge priv pub readonly ref regardless register resource
restrict self set shared sizeof smooth snorm static subroutine super target template this trait try type unless unorm
unsafe unsized use using varying virtual volatile wgsl where with writeonly yield NULL Self alignas alignof
asm_fragment auto catch class co_await co_return co_yield concept const_cast consteval constexpr constinit decltype
demote_to_helper dynamic_cast export friend fxgroup macro_rules mutable namespace noexcept non_coherent noncoherent
noperspective nullptr operator partition precision protected public reinterpret_cast require static_assert static_cast
std thread_local throw typedef typeid typename typeof union storage uniform workgroup private handle read write
read_write
"""
_FUNCTIONS = """
abs acos asin atan ceil clamp cos cross distance dot exp exp2 expf fabs floor fma fmaf fmax fmin fract inverseSqrt
length log log2 logf max min mix modf pack2x16float pow radians round rsqrt sign sin smoothstep sqrt step tan tanh
transpose trunc unpack2x16float mulhi normalize reflect exp2f log2f sqrtf rsqrtf tanhf sinf cosf floorf ceilf fabsf
fmaxf fminf subgroupAdd subgroupMax subgroupMin subgroupShuffle subgroupShuffleXor saturate any all
"""
RESERVED = frozenset(" ".join((_CPP, _CUDA, _METAL, _WGSL, _FUNCTIONS)).split())
