// Absorbed attention in seven kernels: a row's queries absorb W_K; scores of absorbed positions, and of those whose
// keys are there; one softmax over both; the two sums that it weighs; outputs, through W_V. Scores and weights pass
// through the scratch, so the softmax and every sum begin at a row's first position and end at its last, in the order
// of positions, however many blocks of threads take part.

#include <algorithm>
#include <limits>
#include <type_traits>

#include "common/units.h"
#include "kernels/cuda/absorbed/absorbed.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reductions.cuh"

namespace poise::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kShared = 4;  // lanes that share a key
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Whether heads of queries, keys and values may be read eight numbers at a time.
bool by_eights(const Attention& op) { return op.head_dim * size_of(op.dtype).n % 16 == 0; }

// Scores of one block's positions, of all heads: a warp takes every fourth position, eight heads at a time, four lanes
// to a head, each every fourth eight of its numbers.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    score_keys_kernel(const __grid_constant__ AbsorbedAttention op, unsigned blocks, bool aligned) {
  const Attention& attention = op.attention;
  const auto row = static_cast<std::int64_t>(blockIdx.x / blocks);
  const auto block = static_cast<int>(blockIdx.x % blocks);
  const AbsorbedContext context(op, row);
  if (!context.sees(block * kBlockTokens) || context.absorbs(block)) {
    return;
  }
  const AbsorbedRoom room(op);
  const int dim = attention.head_dim;
  const int group = attention.heads / attention.kv_heads;
  const T* queries = static_cast<const T*>(attention.q) +
                     std::int64_t{context.sequence.first_row} * attention.heads * dim;
  const T* keys = context.keys<T>(attention, block);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int i = static_cast<int>(threadIdx.x) / kWarp; i < kBlockTokens; i += kWarps) {
    const int position = block * kBlockTokens + i;
    if (!context.sees(position)) {
      return;
    }
    const T* keys_here = keys + std::int64_t{i} * 2 * attention.kv_heads * dim;
    for (int first = 0; first < attention.heads; first += kWarp / kShared) {
      const int head = first + lane / kShared;
      float sum = 0;
      if (head < attention.heads) {
        const T* q = queries + std::int64_t{head} * dim;
        const T* key = keys_here + std::int64_t{head / group} * dim;
        for (int d = lane % kShared * kEight; d < dim; d += kShared * kEight) {
          const Eight a = load_eight(q + d, dim - d, aligned);
          const Eight b = load_eight(key + d, dim - d, aligned);
#pragma unroll
          for (int e = 0; e < kEight; ++e) {
            sum = fmaf(a.x[e], b.x[e], sum);
          }
        }
      }
      sum += __shfl_xor_sync(kAllLanes, sum, 1);
      sum += __shfl_xor_sync(kAllLanes, sum, 2);
      if (lane % kShared == 0 && head < attention.heads) {
        room.scores(row, head)[position] = sum;
      }
    }
  }
}

// Scores of a row's query head to weights, of which the largest is 1. To absorbed scores q · b_K is added. Weights take
// the scores' place, a chunk at a time, once all of it was read.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    weigh_kernel(const __grid_constant__ AbsorbedAttention op) {
  __shared__ float shared[kWarps];
  const Attention& attention = op.attention;
  const auto heads = static_cast<unsigned>(attention.heads);
  const auto row = static_cast<std::int64_t>(blockIdx.x / heads);
  const auto head = static_cast<int>(blockIdx.x % heads);
  const auto thread = static_cast<int>(threadIdx.x);
  const AbsorbedContext context(op, row);
  const AbsorbedRoom room(op);
  float bias = 0;
  if (op.b_kv != nullptr) {
    const int dim = attention.head_dim;
    const T* q = static_cast<const T*>(attention.q) +
                 (std::int64_t{context.sequence.first_row} * attention.heads + head) * dim;
    const T* of_keys = static_cast<const T*>(op.b_kv) +
                       std::int64_t{head / (attention.heads / attention.kv_heads)} * dim;
    for (int d = thread; d < dim; d += kThreads) {
      bias = fmaf(to_float(q[d]), to_float(of_keys[d]), bias);
    }
    bias = over_block<kThreads>(bias, 0.0f, Add(), shared);
  }
  const float* scores = room.scores(row, head);
  T* weights = room.weights<T>(row, head);
  const auto score = [&](int position, bool absorbs) {
    return (absorbs ? __fadd_rn(scores[position], bias) : scores[position]) * attention.scale;
  };
  float maximum = -kInfinity;
  for (int at = thread; context.sees(at); at += kThreads) {
    maximum = fmaxf(maximum, score(at, context.absorbs(at / kBlockTokens)));
  }
  maximum = over_block<kThreads>(maximum, -kInfinity, Larger(), shared);
  float total = 0, absorbed = 0;
  const int end = context.block_count() * kBlockTokens;
  for (int chunk = 0; chunk < end; chunk += kThreads) {
    const int at = chunk + thread;
    float weight = 0;
    if (context.sees(at)) {
      const bool absorbs = context.absorbs(at / kBlockTokens);
      weight = expf(score(at, absorbs) - maximum);
      total += weight;
      absorbed += absorbs ? weight : 0.0f;
    }
    __syncthreads();
    if (at < end) {
      weights[at] = from_float<T>(weight);
    }
  }
  total = over_block<kThreads>(total, 0.0f, Add(), shared);
  absorbed = over_block<kThreads>(absorbed, 0.0f, Add(), shared);
  if (thread == 0) {
    const float share = __fdiv_rn(1.0f, total);
    room.numbers(row, head) = {.share_of_one = share, .absorbed = absorbed * share};
  }
}

// Sums of values that are there: a thread has eight numbers of a head.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_values_kernel(const __grid_constant__ AbsorbedAttention op, unsigned parts, bool aligned) {
  const Attention& attention = op.attention;
  const int dim = attention.head_dim;
  const int eights = (dim + kEight - 1) / kEight;
  const auto row = static_cast<std::int64_t>(blockIdx.x / parts);
  const int item = static_cast<int>(blockIdx.x % parts) * kThreads + static_cast<int>(threadIdx.x);
  const bool has_head = item / eights < attention.heads;
  const int head = has_head ? item / eights : 0, column = item % eights * kEight;
  const AbsorbedContext context(op, row);
  const AbsorbedRoom room(op);
  const T* weights = room.weights<T>(row, head);
  const std::int64_t step = std::int64_t{2} * attention.kv_heads * dim;
  const std::int64_t offset =
      std::int64_t{attention.kv_heads + head / (attention.heads / attention.kv_heads)} * dim +
      column;
  Eight sums{};
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int first = 0; first < context.block_count(); first += kWarp) {
    const bool holds = first + lane < context.block_count() && !context.absorbs(first + lane);
    // Those of 32 blocks that hold values, in order.
    for (unsigned left = __ballot_sync(kAllLanes, holds); left != 0; left &= left - 1) {
      const int block = first + __ffs(static_cast<int>(left)) - 1;
      const T* values = context.keys<T>(attention, block) + offset;
#pragma unroll 4
      for (int i = 0; i < kBlockTokens; ++i) {
        const int position = block * kBlockTokens + i;
        if (context.sees(position)) {
          const float weight = to_float(weights[position]);
          const Eight value = load_eight(values + i * step, dim - column, aligned);
#pragma unroll
          for (int e = 0; e < kEight; ++e) {
            sums.x[e] = fmaf(weight, value.x[e], sums.x[e]);
          }
        }
      }
    }
  }
  const float share = room.numbers(row, head).share_of_one;
  float* to = room.values(row, head) + column;
#pragma unroll
  for (int e = 0; e < kEight; ++e) {
    if (has_head && column + e < dim) {
      to[e] = sums.x[e] * share;
    }
  }
}

void check_sizes(const AbsorbedAttention& op) {
  const Attention& attention = op.attention;
  require(attention.head_dim >= 1 && attention.head_dim <= 256, "a head is 1 to 256 wide");
  require(attention.kv_heads >= 1 && attention.heads % attention.kv_heads == 0,
          "query heads share key-value heads evenly");
  require(attention.row_dtype == attention.dtype, "queries and outputs are of the stored type");
  require(attention.format == KvFormat::plain && attention.window == 0,
          "absorbed attention reads plain blocks, without a window");
  require(op.w_kv.rows == 2 * attention.kv_heads * attention.head_dim && op.w_kv.cols >= 1 &&
              !op.w_kv.packed.is_packed() && op.w_kv.dtype == attention.dtype,
          "plain W_K and W_V of the stored type are absorbed");
  require(op.scratch_rows >= 1 && attention.max_context >= 1 &&
              AbsorbedRoom(op).row_floats() ==
                  absorbed_row_floats(op.w_kv.cols, attention.head_dim, attention.max_context),
          "absorbed attention has room for a row");
}

const AbsorbedProducts& products_for(const AbsorbedAttention& op) {
  const DType dtype = op.attention.dtype;
  if (dtype == DType::float32 || op.attention.head_dim % kEight != 0 ||
      op.w_kv.cols % kEight != 0) {
    return kAbsorbedPlainly;
  }
  return dtype == DType::float16 ? kAbsorbedFloat16 : kAbsorbedBFloat16;
}

// All sequences at once: there is room for their rows.
template <typename T>
void attend(const AbsorbedAttention& op, cudaStream_t stream) {
  const Attention& attention = op.attention;
  const AbsorbedProducts& products = products_for(op);
  const bool aligned = by_eights(attention);
  const std::int64_t rows = attention.sequence_count;
  const std::int64_t blocks = ceil_div(attention.max_context, kBlockTokens);
  const std::int64_t parts =
      ceil_div(attention.heads * ceil_div(attention.head_dim, kEight), kThreads);
  products.absorb_queries(op, stream);
  products.score(op, stream);
  launch("score keys", &score_keys_kernel<T>, {.blocks = rows * blocks, .threads = kThreads},
         stream, op, static_cast<unsigned>(blocks), aligned);
  launch("weigh positions", &weigh_kernel<T>,
         {.blocks = rows * attention.heads, .threads = kThreads}, stream, op);
  launch("sum values", &sum_values_kernel<T>, {.blocks = rows * parts, .threads = kThreads}, stream,
         op, static_cast<unsigned>(parts), aligned);
  products.sum(op, stream);
  products.write_out(op, stream);
}

}  // namespace

void absorbed_attention(const AbsorbedAttention& op, cudaStream_t stream) {
  if (op.attention.sequence_count <= 0) {
    return;
  }
  check_sizes(op);
  AbsorbedAttention some = op;
  for (std::int32_t left = op.attention.sequence_count; left > 0; left -= op.scratch_rows) {
    some.attention.sequence_count = std::min(op.scratch_rows, left);
    with_type(op.attention.dtype,
              [&](auto* type) { attend<std::remove_pointer_t<decltype(type)>>(some, stream); });
    some.attention.sequences += some.attention.sequence_count;
  }
}

}  // namespace poise::cuda
