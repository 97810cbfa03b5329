// Keys and values to codes: a warp to a head of a row, two neighbouring numbers of a group to a lane. Every
// operation is the one that common/formats/kv_format.h names, so the bits are the CPU's.

#include <limits>

#include "common/formats/kv_format.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reductions.cuh"

namespace poise::cuda {
namespace {

constexpr int kHeadsAtOnce = 8;
constexpr float kBeyond = std::numeric_limits<float>::infinity();
static_assert(kKvGroup == 2 * kWarp);

__device__ float round_up_to(float x, float*) { return x; }
__device__ __half round_up_to(float x, __half*) {
  const __half near = __float2half_rn(x);
  return __half2float(near) < x ? __ushort_as_half(__half_as_ushort(near) + 1) : near;
}
__device__ __nv_bfloat16 round_up_to(float x, __nv_bfloat16*) {
  const __nv_bfloat16 near = __float2bfloat16_rn(x);
  return __bfloat162float(near) < x ? __ushort_as_bfloat16(__bfloat16_as_ushort(near) + 1) : near;
}
__device__ float quiet_nan(float*) { return __uint_as_float(0x7fc00000u); }
__device__ __half quiet_nan(__half*) { return __ushort_as_half(0x7e00); }
__device__ __nv_bfloat16 quiet_nan(__nv_bfloat16*) { return __ushort_as_bfloat16(0x7fc0); }

// What the kernel needs of a QuantizeKv and of its layout.
struct QuantizeSizes {
  std::int64_t items;  // heads of all rows
  std::int64_t row, groups_at;
  int heads, head_dim, codes, groups;  // heads of a row: K's and V's; bytes; groups of a head
  bool bytes;                          // a code is one
  float levels;
};

template <typename T>
__global__ void __launch_bounds__(kHeadsAtOnce* kWarp)
    quantize_kv_kernel(char* out, const T* in, const QuantizeSizes sizes) {
  const std::int64_t item =
      std::int64_t{blockIdx.x} * kHeadsAtOnce + static_cast<int>(threadIdx.x) / kWarp;
  if (item >= sizes.items) {
    return;
  }
  const int lane = threadIdx.x % kWarp;
  const auto head = static_cast<int>(item % sizes.heads);
  char* const row = out + item / sizes.heads * sizes.row;
  const T* const x = in + item * sizes.head_dim;
  char* const codes = row + std::int64_t{head} * sizes.codes;
  T* const groups = reinterpret_cast<T*>(row + sizes.groups_at) + head * sizes.groups * 2;
  for (int group = 0; group < sizes.groups; ++group) {
    const int d = group * kKvGroup + 2 * lane;
    float number[2], least = kBeyond, most = -kBeyond;
    bool finite = true;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool exists = d + i < sizes.head_dim;
      number[i] = exists ? to_float(x[d + i]) : 0.0f;
      if (exists) {
        finite = finite && isfinite(number[i]);
        least = fminf(least, number[i]);
        most = fmaxf(most, number[i]);
      }
    }
    least = -over_warp(-least, Larger());
    most = over_warp(most, Larger());
    const float range = __fadd_rn(__fsub_rn(most, least), 0.0f);
    const bool good = __all_sync(kAllLanes, finite) && isfinite(range);
    const T scale = good ? round_up_to(__fdiv_rn(range, sizes.levels), static_cast<T*>(nullptr))
                         : quiet_nan(static_cast<T*>(nullptr));
    const T offset =
        good ? from_float<T>(__fadd_rn(least, 0.0f)) : quiet_nan(static_cast<T*>(nullptr));
    if (lane == 0) {
      groups[2 * group] = scale;
      groups[2 * group + 1] = offset;
    }
    unsigned code[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float steps = __fdiv_rn(__fsub_rn(number[i], to_float(offset)), to_float(scale));
      const bool some = to_float(scale) > 0.0f && d + i < sizes.head_dim;
      code[i] = some ? __float2uint_rn(fminf(steps, sizes.levels)) : 0u;
    }
    if (sizes.bytes) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (d + i < sizes.head_dim) {
          codes[d + i] = static_cast<char>(code[i]);
        }
      }
    } else if (d < sizes.head_dim) {
      codes[d / 2] = static_cast<char>(code[0] | code[1] << 4);
    }
  }
  if (head == 0) {  // what no head has
    for (auto at = std::int64_t{sizes.heads} * sizes.codes + lane; at < sizes.groups_at;
         at += kWarp) {
      row[at] = 0;
    }
    for (auto at = sizes.groups_at +
                   std::int64_t{sizes.heads} * sizes.groups * 2 * sizeof(T) + lane;
         at < sizes.row; at += kWarp) {
      row[at] = 0;
    }
  }
}

}  // namespace

void quantize_kv(const QuantizeKv& op, cudaStream_t stream) {
  require(op.head_dim >= 1 && op.head_dim <= 256, "a head is 1 to 256 wide");
  require(op.format != KvFormat::plain, "plain rows are not quantised");
  const KvRowLayout layout = kv_row_layout(op.kv_heads, op.head_dim, op.dtype, op.format);
  const QuantizeSizes sizes{.items = op.rows * 2 * op.kv_heads,
                            .row = layout.row,
                            .groups_at = layout.groups_at,
                            .heads = 2 * op.kv_heads,
                            .head_dim = op.head_dim,
                            .codes = static_cast<int>(layout.codes),
                            .groups = layout.groups,
                            .bytes = op.format == KvFormat::int8,
                            .levels = static_cast<float>(kv_levels(op.format))};
  with_type(op.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    launch("quantise keys and values", &quantize_kv_kernel<T>,
           {.blocks = ceil_div(sizes.items, kHeadsAtOnce), .threads = kHeadsAtOnce * kWarp}, stream,
           reinterpret_cast<char*>(op.out), static_cast<const T*>(op.in), sizes);
  });
}

}  // namespace poise::cuda
