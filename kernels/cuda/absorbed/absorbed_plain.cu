// Products of absorbed attention for float32, and for sizes that tensor cores do not take: one chain of fused
// multiply-adds for an output, or one to a lane, the lanes then added in halves.

#include "common/units.h"
#include "kernels/cuda/absorbed/absorbed.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reductions.cuh"

namespace poise::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;

// Which outputs a block of threads makes: some of those of a row's query head.
struct Place {
  std::int64_t row;
  int head, part;

  __device__ Place(const Attention& op, unsigned parts)
      : row(blockIdx.x / parts / static_cast<unsigned>(op.heads)),
        head(static_cast<int>(blockIdx.x / parts % static_cast<unsigned>(op.heads))),
        part(static_cast<int>(blockIdx.x % parts)) {}
  // Of q and out.
  __device__ std::int64_t offset(const Attention& op) const {
    return (std::int64_t{op.sequences[row].first_row} * op.heads + head) * op.head_dim;
  }
  // A row of [W_K W_V], for a column of the head.
  __device__ std::int64_t key_row(const Attention& op, int column) const {
    return std::int64_t{head / (op.heads / op.kv_heads)} * op.head_dim + column;
  }
  __device__ std::int64_t value_row(const Attention& op, int column) const {
    return key_row(op, column) + std::int64_t{op.kv_heads} * op.head_dim;
  }
};

template <typename T>
__device__ const T* weight_row(const AbsorbedAttention& op, std::int64_t row) {
  return static_cast<const T*>(op.w_kv.data) + row * op.w_kv.cols;
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    absorb_queries_kernel(const __grid_constant__ AbsorbedAttention op, unsigned parts) {
  const Attention& attention = op.attention;
  const Place place(attention, parts);
  const int column = place.part * kThreads + static_cast<int>(threadIdx.x);
  if (column >= op.w_kv.cols) {
    return;
  }
  const T* q = static_cast<const T*>(attention.q) + place.offset(attention);
  const T* weight = weight_row<T>(op, place.key_row(attention, 0)) + column;
  float sum = 0;
  for (int d = 0; d < attention.head_dim; ++d) {
    sum = fmaf(to_float(q[d]), to_float(weight[std::int64_t{d} * op.w_kv.cols]), sum);
  }
  AbsorbedRoom(op).sums(place.row, place.head)[column] = sum;
}

// A part is a block of the context; a warp takes every fourth of its positions.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    score_kernel(const __grid_constant__ AbsorbedAttention op, unsigned parts) {
  const Place place(op.attention, parts);
  const AbsorbedContext context(op, place.row);
  if (!context.sees(place.part * kBlockTokens) || !context.absorbs(place.part)) {
    return;
  }
  const AbsorbedRoom room(op);
  const float* query = room.sums(place.row, place.head);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  for (int i = static_cast<int>(threadIdx.x) / kWarp; i < kBlockTokens; i += kWarps) {
    const int position = place.part * kBlockTokens + i;
    if (!context.sees(position)) {
      return;
    }
    const T* row = context.activations<T>(op, place.part) + std::int64_t{i} * op.w_kv.cols;
    float sum = 0;
    for (int c = lane; c < op.w_kv.cols; c += kWarp) {
      sum = fmaf(query[c], to_float(row[c]), sum);
    }
    sum = over_warp(sum, Add());
    if (lane == 0) {
      room.scores(place.row, place.head)[position] = sum;
    }
  }
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    sum_kernel(const __grid_constant__ AbsorbedAttention op, unsigned parts) {
  const Place place(op.attention, parts);
  const int column = place.part * kThreads + static_cast<int>(threadIdx.x);
  if (column >= op.w_kv.cols) {
    return;
  }
  const AbsorbedContext context(op, place.row);
  const AbsorbedRoom room(op);
  const T* weights = room.weights<T>(place.row, place.head);
  float sum = 0;
  for (int block = 0; block < context.block_count(); ++block) {
    if (context.absorbs(block)) {
      const T* row = context.activations<T>(op, block) + column;
      for (int i = 0; i < kBlockTokens && context.sees(block * kBlockTokens + i); ++i) {
        sum = fmaf(to_float(weights[block * kBlockTokens + i]),
                   to_float(row[std::int64_t{i} * op.w_kv.cols]), sum);
      }
    }
  }
  room.sums(place.row, place.head)[column] = sum * room.numbers(place.row, place.head).share_of_one;
}

// A part is the columns of a block's warps.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    write_out_kernel(const __grid_constant__ AbsorbedAttention op, unsigned parts) {
  const Attention& attention = op.attention;
  const Place place(attention, parts);
  const int column = place.part * kWarps + static_cast<int>(threadIdx.x) / kWarp;
  if (column >= attention.head_dim) {
    return;
  }
  const AbsorbedRoom room(op);
  const float* inputs = room.sums(place.row, place.head);
  const std::int64_t row = place.value_row(attention, column);
  const T* weight = weight_row<T>(op, row);
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  float sum = 0;
  for (int c = lane; c < op.w_kv.cols; c += kWarp) {
    sum = fmaf(inputs[c], to_float(weight[c]), sum);
  }
  sum = over_warp(sum, Add());
  if (op.b_kv != nullptr) {
    sum = fmaf(room.numbers(place.row, place.head).absorbed,
               to_float(static_cast<const T*>(op.b_kv)[row]), sum);
  }
  if (lane == 0) {
    static_cast<T*>(attention.out)[place.offset(attention) + column] =
        from_float<T>(sum + room.values(place.row, place.head)[column]);
  }
}

void launch_parts(const char* name, const AbsorbedAttention& op, std::int64_t parts,
                  cudaStream_t stream, void (*of_float32)(AbsorbedAttention, unsigned),
                  void (*of_float16)(AbsorbedAttention, unsigned),
                  void (*of_bfloat16)(AbsorbedAttention, unsigned)) {
  const DType dtype = op.attention.dtype;
  launch(name,
         dtype == DType::float32   ? of_float32
         : dtype == DType::float16 ? of_float16
                                   : of_bfloat16,
         {.blocks = std::int64_t{op.attention.sequence_count} * op.attention.heads * parts,
          .threads = kThreads},
         stream, op, static_cast<unsigned>(parts));
}

}  // namespace

const AbsorbedProducts kAbsorbedPlainly{
    .absorb_queries =
        [](const AbsorbedAttention& op, cudaStream_t stream) {
          launch_parts("absorb queries", op, ceil_div(op.w_kv.cols, kThreads), stream,
                       &absorb_queries_kernel<float>, &absorb_queries_kernel<__half>,
                       &absorb_queries_kernel<__nv_bfloat16>);
        },
    .score =
        [](const AbsorbedAttention& op, cudaStream_t stream) {
          launch_parts("score activations", op, ceil_div(op.attention.max_context, kBlockTokens),
                       stream, &score_kernel<float>, &score_kernel<__half>,
                       &score_kernel<__nv_bfloat16>);
        },
    .sum =
        [](const AbsorbedAttention& op, cudaStream_t stream) {
          launch_parts("sum activations", op, ceil_div(op.w_kv.cols, kThreads), stream,
                       &sum_kernel<float>, &sum_kernel<__half>, &sum_kernel<__nv_bfloat16>);
        },
    .write_out =
        [](const AbsorbedAttention& op, cudaStream_t stream) {
          launch_parts("absorbed values", op, ceil_div(op.attention.head_dim, kWarps), stream,
                       &write_out_kernel<float>, &write_out_kernel<__half>,
                       &write_out_kernel<__nv_bfloat16>);
        }};

}  // namespace poise::cuda
