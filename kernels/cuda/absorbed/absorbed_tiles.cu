// Products of absorbed attention on tensor cores (tile_products.cuh): rows times columns make absorbed queries and sums
// of weighted activations, rows times rows scores and outputs.
//
// An absorbed query and a sum of activations pass from the first to the second kind as two 16-bit numbers each, the
// rounded one and what is left. What both lose is far below the output's rounding: of bfloat16 2⁻¹⁷, of float16 2⁻²² of
// the number, or 2⁻²⁵ of a small one. Weights alone are rounded, as those of attention are.
//
// Bits: of a number in two parts the upper part of sixteen inputs comes first. A sum of activations takes block by
// block, leaving out those that are not absorbed. So bits follow from a row's positions and from which of them are
// absorbed alone.

#include "common/units.h"
#include "kernels/cuda/absorbed/absorbed.h"
#include "kernels/cuda/absorbed/tile_products.cuh"
#include "kernels/cuda/launch.h"

namespace poise::cuda {
namespace {

// Rows of a head's queries times that head's W_K.
template <typename T>
class Queries {
 public:
  __device__ Queries(const AbsorbedAttention& op, int head, int first_row, int first_column)
      : hidden_(op.w_kv.cols), dim_(op.attention.head_dim), input_(by_columns::Mine().input) {
    const Attention& attention = op.attention;
    const int row = first_row + by_columns::Mine().row;
    if (row < attention.sequence_count) {
      const std::int64_t at = attention.sequences[row].first_row;
      query_ = static_cast<const T*>(attention.q) + (at * attention.heads + head) * dim_ + input_;
    }
    const int column = first_column + by_columns::Mine().column;
    if (column < hidden_) {
      const std::int64_t at = head / (attention.heads / attention.kv_heads);
      weight_ = static_cast<const T*>(op.w_kv.data) + at * dim_ * hidden_ + column;
    }
  }

  __device__ const T* row(int step) const {
    return query_ != nullptr && 16 * step + input_ < dim_ ? query_ + 16 * step : nullptr;
  }
  __device__ const T* other(int step, int k) const {
    return weight_ != nullptr && 16 * step + k < dim_ ? weight_ + (16 * step + k) * hidden_
                                                      : nullptr;
  }

 private:
  const std::int64_t hidden_;
  const int dim_, input_;
  const T* query_ = nullptr;
  const T* weight_ = nullptr;
};

template <typename T>
__global__ void __launch_bounds__(kProductThreads)
    absorb_queries_kernel(const __grid_constant__ AbsorbedAttention op, unsigned row_tiles,
                          unsigned column_tiles) {
  extern __shared__ __align__(128) char shared[];
  const Tile tile(row_tiles, column_tiles);
  const int head = tile.third;
  const int first_row = tile.first * kTileRows, first_column = tile.second * by_columns::kColumns;
  by_columns::Sums<T> sums;
  sums.add(Queries<T>(op, head, first_row, first_column), (op.attention.head_dim + 15) / 16,
           shared);
  const AbsorbedRoom room(op);
  sums.each([&](int m, int n, float x, float y) {
    const int row = first_row + m, column = first_column + n;
    if (row < op.attention.sequence_count && column < op.w_kv.cols) {
      write_parts(reinterpret_cast<T*>(room.sums(row, head)) + column, op.w_kv.cols, x, y);
    }
  });
}

// A row's absorbed queries times the activations of 64 positions.
template <typename T>
struct Scores {
  const AbsorbedAttention& op;
  const AbsorbedRoom& room;
  const AbsorbedContext& context;
  const std::int64_t row;
  const int first_head, first_position;

  __device__ bool absorbs(int n) const {
    const int position = first_position + n;
    return context.sees(position) && context.absorbs(position / kBlockTokens);
  }
  __device__ const T* upper(int m) const {
    const int head = first_head + m;
    return head < op.attention.heads ? reinterpret_cast<const T*>(room.sums(row, head)) : nullptr;
  }
  __device__ const T* other(int n) const {
    const int position = first_position + n;
    return absorbs(n) ? context.activations<T>(op, position / kBlockTokens) +
                            std::int64_t{position % kBlockTokens} * op.w_kv.cols
                      : nullptr;
  }
  // Also of a position behind the last, which nothing reads.
  __device__ void write(int m, int n, float x, float y) const {
    if (first_head + m < op.attention.heads && absorbs(n)) {
      *reinterpret_cast<float2*>(room.scores(row, first_head + m) + first_position + n) = {x, y};
    }
  }
};

template <typename T>
__global__ void __launch_bounds__(kProductThreads)
    score_kernel(const __grid_constant__ AbsorbedAttention op, unsigned head_tiles,
                 unsigned position_tiles) {
  extern __shared__ __align__(128) char shared[];
  const Tile tile(head_tiles, position_tiles);
  const AbsorbedContext context(op, tile.third);
  const int first = tile.second * by_rows::kColumns;
  const AbsorbedRoom room(op);
  const Scores<T> scores{op, room, context, tile.third, tile.first * kTileRows, first};
  bool any = false;
#pragma unroll
  for (int n = 0; n < by_rows::kColumns; n += kBlockTokens) {
    any = any || scores.absorbs(n);
  }
  if (any) {
    by_rows::multiply<T>(scores, op.w_kv.cols, shared);
  }
}

constexpr int kListed = 512;  // of a context's blocks, at a time
struct Listed {
  int block;
  std::uint32_t slot;
};

// A row's weights times its activations: a step is an absorbed block.
template <typename T>
class Activations {
 public:
  // `absorbed`: by step; `last`: position that the row sees.
  __device__ Activations(const AbsorbedAttention& op, const T* weights, const Listed* absorbed,
                         int last, int column)
      : hidden_(op.w_kv.cols), absorbed_(absorbed), last_(last), weights_(weights) {
    if (column < hidden_) {
      act_ = static_cast<const T*>(op.act) + column;
    }
  }

  __device__ const T* row(int step) const {
    return weights_ != nullptr ? weights_ + absorbed_[step].block * kBlockTokens : nullptr;
  }
  __device__ const T* other(int step, int k) const {
    const Listed at = absorbed_[step];
    return act_ != nullptr && at.block * kBlockTokens + k <= last_
               ? act_ + (std::int64_t{at.slot} * kBlockTokens + k) * hidden_
               : nullptr;
  }

 private:
  const std::int64_t hidden_;
  const Listed* const absorbed_;
  const int last_;
  const T* const weights_;
  const T* act_ = nullptr;
};

// The absorbed ones of blocks first .. end - 1, in order; how many. A warp's.
__device__ int list_absorbed(const AbsorbedContext& context, int first, int end, Listed* list) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  int count = 0;
  for (int block = first; block < end; block += kWarp) {
    const bool mine = block + lane < end && context.absorbs(block + lane);
    const unsigned all = __ballot_sync(kAllLanes, mine);
    if (mine) {
      list[count + __popc(all & ((1u << lane) - 1))] = {block + lane,
                                                        context.blocks[block + lane].slot};
    }
    count += __popc(all);
  }
  return count;
}

template <typename T>
__global__ void __launch_bounds__(kProductThreads)
    sum_kernel(const __grid_constant__ AbsorbedAttention op, unsigned head_tiles,
               unsigned column_tiles) {
  extern __shared__ __align__(128) char shared[];
  __shared__ Listed absorbed[kListed];
  __shared__ int count;
  const Tile tile(head_tiles, column_tiles);
  const AbsorbedContext context(op, tile.third);
  const AbsorbedRoom room(op);
  const by_columns::Mine mine;
  const int first_head = tile.first * kTileRows, first_column = tile.second * by_columns::kColumns;
  const T* weights = first_head + mine.row < op.attention.heads
                         ? room.weights<T>(tile.third, first_head + mine.row) + mine.input
                         : nullptr;
  const Activations<T> activations(op, weights, absorbed, context.sequence.context,
                                   first_column + mine.column);
  by_columns::Sums<T> sums;
  for (int first = 0; first < context.block_count(); first += kListed) {
    if (threadIdx.x < kWarp) {
      const int listed =
          list_absorbed(context, first, min(context.block_count(), first + kListed), absorbed);
      if (threadIdx.x == 0) {
        count = listed;
      }
    }
    __syncthreads();
    sums.add(activations, count, shared);
  }
  sums.each([&](int m, int n, float x, float y) {
    const int head = first_head + m, column = first_column + n;
    if (head < op.attention.heads && column < op.w_kv.cols) {
      const float share = room.numbers(tile.third, head).share_of_one;
      write_parts(reinterpret_cast<T*>(room.sums(tile.third, head)) + column, op.w_kv.cols,
                  x * share, y * share);
    }
  });
}

// Sums of activations of rows times a head's W_V; what keys and values that are there gave is added.
template <typename T>
struct Values {
  const AbsorbedAttention& op;
  const AbsorbedRoom& room;
  const int head, first_row, first_column;

  __device__ std::int64_t weight_row(int n) const {
    const Attention& attention = op.attention;
    return (attention.kv_heads + std::int64_t{head / (attention.heads / attention.kv_heads)}) *
               attention.head_dim +
           first_column + n;
  }
  __device__ bool has_row(int m) const { return first_row + m < op.attention.sequence_count; }
  __device__ bool has_column(int n) const { return first_column + n < op.attention.head_dim; }

  __device__ const T* upper(int m) const {
    return has_row(m) ? reinterpret_cast<const T*>(room.sums(first_row + m, head)) : nullptr;
  }
  __device__ const T* other(int n) const {
    return has_column(n) ? static_cast<const T*>(op.w_kv.data) + weight_row(n) * op.w_kv.cols
                         : nullptr;
  }
  __device__ void write(int m, int n, float x, float y) const {
    if (!has_row(m) || !has_column(n)) {
      return;
    }
    const int row = first_row + m, column = first_column + n;
    const float* values = room.values(row, head) + column;
    if (op.b_kv != nullptr) {
      const T* bias = static_cast<const T*>(op.b_kv) + weight_row(n);
      const float weight = room.numbers(row, head).absorbed;
      x = fmaf(weight, to_float(bias[0]), x);
      y = fmaf(weight, to_float(bias[1]), y);
    }
    const Attention& attention = op.attention;
    const std::int64_t to =
        (std::int64_t{attention.sequences[row].first_row} * attention.heads + head) *
            attention.head_dim +
        column;
    *reinterpret_cast<std::uint32_t*>(static_cast<T*>(attention.out) + to) =
        pack<T>(x + values[0], y + values[1]);
  }
};

template <typename T>
__global__ void __launch_bounds__(kProductThreads)
    write_out_kernel(const __grid_constant__ AbsorbedAttention op, unsigned column_tiles,
                     unsigned row_tiles) {
  extern __shared__ __align__(128) char shared[];
  const Tile tile(column_tiles, row_tiles);
  const AbsorbedRoom room(op);
  by_rows::multiply<T>(
      Values<T>{op, room, tile.third, tile.second * kTileRows, tile.first * by_rows::kColumns},
      op.w_kv.cols, shared);
}

using TileKernel = void (*)(AbsorbedAttention op, unsigned first_count, unsigned second_count);

// Tiles of `first` times `second` times `third`.
void launch_tiles(const char* name, TileKernel kernel, int shared_bytes, std::int64_t first,
                  std::int64_t second, std::int64_t third, const AbsorbedAttention& op,
                  cudaStream_t stream) {
  launch(name, kernel,
         {.blocks = first * second * third,
          .threads = kProductThreads,
          .shared_bytes = static_cast<std::size_t>(shared_bytes)},
         stream, op, static_cast<unsigned>(first), static_cast<unsigned>(second));
}

template <typename T>
constexpr AbsorbedProducts tiled_products() {
  return {.absorb_queries =
              [](const AbsorbedAttention& op, cudaStream_t stream) {
                launch_tiles("absorb queries", &absorb_queries_kernel<T>, by_columns::Ring::kBytes,
                             ceil_div(op.attention.sequence_count, kTileRows),
                             ceil_div(op.w_kv.cols, by_columns::kColumns), op.attention.heads, op,
                             stream);
              },
          .score =
              [](const AbsorbedAttention& op, cudaStream_t stream) {
                launch_tiles("score activations", &score_kernel<T>, by_rows::Ring::kBytes,
                             ceil_div(op.attention.heads, kTileRows),
                             ceil_div(op.attention.max_context, by_rows::kColumns),
                             op.attention.sequence_count, op, stream);
              },
          .sum =
              [](const AbsorbedAttention& op, cudaStream_t stream) {
                launch_tiles("sum activations", &sum_kernel<T>, by_columns::Ring::kBytes,
                             ceil_div(op.attention.heads, kTileRows),
                             ceil_div(op.w_kv.cols, by_columns::kColumns),
                             op.attention.sequence_count, op, stream);
              },
          .write_out =
              [](const AbsorbedAttention& op, cudaStream_t stream) {
                launch_tiles("absorbed values", &write_out_kernel<T>, by_rows::Ring::kBytes,
                             ceil_div(op.attention.head_dim, by_rows::kColumns),
                             ceil_div(op.attention.sequence_count, kTileRows), op.attention.heads,
                             op, stream);
              }};
}

}  // namespace

const AbsorbedProducts kAbsorbedFloat16 = tiled_products<__half>();
const AbsorbedProducts kAbsorbedBFloat16 = tiled_products<__nv_bfloat16>();

}  // namespace poise::cuda
