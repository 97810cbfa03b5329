// Rotary positions, in place, and the norm over a head before them. A team of lanes takes a part of one
// row's heads: each lane eight neighbouring pairs, whose cosines and sines it computes once for all the
// heads of the part. Where eights do not fit (rare widths, or a norm over a head that is rotated in
// part), a warp takes one head, number by number. Which of the two follows from the model's shape alone.
//
// Sine and cosine are the CPU's polynomials (kernels/cpu/math_lanes.h), operation by operation; so are
// the rotation's own operations. So without a norm the bits are the CPU's.

#include <algorithm>
#include <bit>

#include "common/units.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reductions.cuh"

namespace poise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxHeadsEach = 8;  // of one team
constexpr std::int64_t kManyBlocks = 1024;

struct Turn {
  float cosine, sine;
};

// For x in [0, 2²⁰]: x = n·π/2 + r, π/2 in three parts.
__device__ __forceinline__ Turn turn_by(float x) {
  constexpr float kShift = 12582912.0f;  // 1.5·2²³: adding it rounds to a whole number
  const float shifted = __fmaf_rn(x, 0x1.45f306p-1f, kShift);
  const float n = __fsub_rn(shifted, kShift);
  float r = __fmaf_rn(n, -0x1.921fb6p+0f, x);
  r = __fmaf_rn(n, 0x1.777a5cp-25f, r);
  r = __fmaf_rn(n, 0x1.ee59dap-50f, r);
  const float u = __fmul_rn(r, r);
  float p = -1.9515295891e-4f;
  p = __fmaf_rn(p, u, 8.3321608736e-3f);
  p = __fmaf_rn(p, u, -1.6666654611e-1f);
  const float sine = __fmaf_rn(__fmul_rn(p, u), r, r);
  float q = 2.443315711809948e-5f;
  q = __fmaf_rn(q, u, -1.388731625493765e-3f);
  q = __fmaf_rn(q, u, 4.166664568298827e-2f);
  const float cosine = __fmaf_rn(__fmul_rn(q, u), u, __fmaf_rn(-0.5f, u, 1.0f));
  const unsigned quarter = __float_as_uint(shifted) & 3u;  // n mod 4
  const float c = (quarter & 1u) != 0 ? sine : cosine;
  const float s = (quarter & 1u) != 0 ? cosine : sine;
  return {.cosine = quarter == 1 || quarter == 2 ? -c : c, .sine = quarter >= 2 ? -s : s};
}

// The place of pair `i` of a row at `position`, scaled.
__device__ __forceinline__ Turn turn_of(float position, float frequency, float scale) {
  const Turn turn = turn_by(__fmul_rn(position, frequency));
  return {.cosine = __fmul_rn(turn.cosine, scale), .sine = __fmul_rn(turn.sine, scale)};
}
__device__ __forceinline__ float turned_first(float first, float second, const Turn& turn) {
  return __fsub_rn(__fmul_rn(first, turn.cosine), __fmul_rn(second, turn.sine));
}
__device__ __forceinline__ float turned_second(float first, float second, const Turn& turn) {
  return __fadd_rn(__fmul_rn(second, turn.cosine), __fmul_rn(first, turn.sine));
}

struct RotateRows {
  Rows inout;
  const RotaryPlace* places;
  const float* frequencies;
  Parameter norm;
  std::int32_t heads, head_dim, pairs;
  float scale, epsilon;

  explicit RotateRows(const Rotate& op)
      : inout(op.inout),
        places(op.places),
        frequencies(op.frequencies),
        norm{.data = op.norm_weight, .dtype = op.dtype, .absent = 1.0f},
        heads(op.heads),
        head_dim(op.head_dim),
        pairs(op.rotary_dim / 2),
        scale(op.scale),
        epsilon(op.epsilon) {}

  __device__ float norm_scale(float squares) const {
    return 1.0f / sqrtf(squares / static_cast<float>(head_dim) + epsilon);
  }
};

// How rows are cut for teams of 2^team_bits lanes.
struct Teams {
  std::int64_t items;  // (row, part)
  int team_bits, parts, heads_each;
  bool frequency_eights, norm_eights;
};

// REQUIRES: pairs a multiple of 8, rows in eights; with a norm, all of a head is rotated.
template <typename T>
__global__ void __launch_bounds__(kThreads) rotate_kernel(const RotateRows op, const Teams teams) {
  const int lane = static_cast<int>(threadIdx.x) & ((1 << teams.team_bits) - 1);
  const std::int64_t item =
      (std::int64_t{blockIdx.x} * kThreads + static_cast<int>(threadIdx.x)) >> teams.team_bits;
  const std::int64_t row = item / teams.parts;
  const int first_head = static_cast<int>(item % teams.parts) * teams.heads_each;
  const int pair = lane * kEight;
  const bool has_pairs = item < teams.items && pair < op.pairs;
  const bool norms = op.norm.data != nullptr;

  Turn turns[kEight];
  Eight first_weight, second_weight;
  if (has_pairs) {
    const RotaryPlace place = op.places[row];
    const Eight frequencies =
        load_eight(op.frequencies + std::int64_t{place.frequencies} * op.pairs + pair, kEight,
                   teams.frequency_eights);
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      turns[i] = turn_of(static_cast<float>(place.position), frequencies.x[i], op.scale);
    }
    first_weight = load_eight(op.norm, pair, kEight, teams.norm_eights);
    second_weight = load_eight(op.norm, op.pairs + pair, kEight, teams.norm_eights);
  }
  T* at = static_cast<T*>(op.inout.data) + row * op.inout.stride +
          std::int64_t{first_head} * op.head_dim + pair;
#pragma unroll 2
  for (int h = 0; h < teams.heads_each; ++h, at += op.head_dim) {
    const bool exists = has_pairs && first_head + h < op.heads;
    Eight first{}, second{};
    if (exists) {
      first = load_eight(at, kEight, true);
      second = load_eight(at + op.pairs, kEight, true);
    }
    if (norms) {  // all lanes, those without a head too
      float squares = 0;
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        squares = __fmaf_rn(first.x[i], first.x[i], squares);
      }
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        squares = __fmaf_rn(second.x[i], second.x[i], squares);
      }
      for (int distance = 1 << teams.team_bits >> 1; distance > 0; distance /= 2) {
        squares = __fadd_rn(squares, __shfl_xor_sync(kAllLanes, squares, distance));
      }
      const float scale = op.norm_scale(squares);
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        first.x[i] = first.x[i] * scale * first_weight.x[i];
        second.x[i] = second.x[i] * scale * second_weight.x[i];
      }
    }
    if (exists) {
      Eight turned_one, turned_two;
#pragma unroll
      for (int i = 0; i < kEight; ++i) {
        turned_one.x[i] = turned_first(first.x[i], second.x[i], turns[i]);
        turned_two.x[i] = turned_second(first.x[i], second.x[i], turns[i]);
      }
      store_eight(at, turned_one, kEight, true);
      store_eight(at + op.pairs, turned_two, kEight, true);
    }
  }
}

// A warp to a head, of any width.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    rotate_any_kernel(const RotateRows op, std::int64_t items) {
  __shared__ float heads[kWarps][kMaxHeadDim];
  const int lane = threadIdx.x % kWarp;
  const std::int64_t item =
      std::int64_t{blockIdx.x} * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (item >= items) {
    return;  // a whole warp
  }
  const std::int64_t row = item / op.heads;
  T* at = static_cast<T*>(op.inout.data) + row * op.inout.stride +
          item % op.heads * std::int64_t{op.head_dim};
  float* x = heads[threadIdx.x / kWarp];
  float squares = 0;
  for (int d = lane; d < op.head_dim; d += kWarp) {
    x[d] = to_float(at[d]);
    squares = __fmaf_rn(x[d], x[d], squares);
  }
  if (op.norm.data != nullptr) {
    const float scale = op.norm_scale(over_warp(squares, Add()));
    for (int d = lane; d < op.head_dim; d += kWarp) {
      x[d] = x[d] * scale * load_eight(op.norm, d, 1, false).x[0];
    }
  }
  __syncwarp();
  if (op.pairs > 0) {
    const RotaryPlace place = op.places[row];
    const float* frequencies = op.frequencies + std::int64_t{place.frequencies} * op.pairs;
    for (int i = lane; i < op.pairs; i += kWarp) {
      const Turn turn = turn_of(static_cast<float>(place.position), frequencies[i], op.scale);
      at[i] = from_float<T>(turned_first(x[i], x[i + op.pairs], turn));
      at[i + op.pairs] = from_float<T>(turned_second(x[i], x[i + op.pairs], turn));
    }
  }
  if (op.norm.data != nullptr) {
    for (int d = 2 * op.pairs + lane; d < op.head_dim; d += kWarp) {
      at[d] = from_float<T>(x[d]);
    }
  }
}

template <typename T>
void rotate_eights(const RotateRows& op, std::int64_t rows, cudaStream_t stream) {
  const int lanes = op.pairs / kEight;
  Teams teams{
      .items = 0,
      .team_bits = static_cast<int>(std::bit_width(static_cast<unsigned>(lanes - 1))),
      .parts = 0,
      .heads_each = kMaxHeadsEach,
      .frequency_eights = in_eights(op.frequencies, op.pairs),
      .norm_eights = in_eights(op.norm),
  };
  const std::int64_t in_block = kThreads >> teams.team_bits;
  // Few rows are cut finer, so that every multiprocessor has some.
  while (teams.heads_each > 1 &&
         ceil_div(rows * ceil_div(op.heads, teams.heads_each), in_block) < kManyBlocks) {
    teams.heads_each /= 2;
  }
  teams.parts = static_cast<int>(ceil_div(op.heads, teams.heads_each));
  teams.items = rows * teams.parts;
  launch("rotate heads", &rotate_kernel<T>,
         {.blocks = ceil_div(teams.items, in_block), .threads = kThreads}, stream, op, teams);
}

}  // namespace

void rotate(const Rotate& op, cudaStream_t stream) {
  require(op.head_dim >= 1 && op.head_dim <= kMaxHeadDim, "a head is 1 to 256 wide");
  require(op.rotary_dim >= 0 && op.rotary_dim <= op.head_dim && op.rotary_dim % 2 == 0,
          "an even part of a head is rotated");
  if (op.rows <= 0 || op.heads <= 0 || (op.rotary_dim == 0 && op.norm_weight == nullptr)) {
    return;
  }
  const RotateRows rows(op);
  with_type(op.inout.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    const auto* inout = static_cast<const T*>(op.inout.data);
    const bool eights = op.rotary_dim > 0 && rows.pairs % kEight == 0 &&
                        op.head_dim % kEight == 0 && in_eights(inout, op.inout.stride) &&
                        (op.norm_weight == nullptr || op.rotary_dim == op.head_dim);
    if (eights) {
      rotate_eights<T>(rows, op.rows, stream);
    } else {
      const std::int64_t items = op.rows * op.heads;
      launch("rotate heads", &rotate_any_kernel<T>,
             {.blocks = ceil_div(items, kWarps), .threads = kThreads}, stream, rows, items);
    }
  });
}

}  // namespace poise::cuda
