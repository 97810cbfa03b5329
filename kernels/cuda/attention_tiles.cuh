#pragma once
// Attention of 16-bit queries, keys and values on tensor cores, one design for a prompt and for a
// decoding row. A block of four warps takes up to 64 rows of one (sequence, head), sixteen to a warp;
// context passes through shared memory in tiles of 64 positions cut at multiples of 64, keys and
// values as separate entries of a ring, so that copies are always under way while a tile is
// computed. With few rows some warps only copy.
//
// Bits of a row: scores of a tile are tensor core products over head_dim, sixteen at a time in order;
// the maximum grows tile by tile; weights are 2^((score - maximum)·scale·log2 e), rounded to the
// stored type for their product with the values, sixteen positions at a time in order; the
// denominator is summed in float32, each lane its own columns, the four lanes at the end. All of it
// follows from positions alone: a row's place among the sixteen, or what the tile's other rows see,
// changes nothing. What a row may not see has weight 0 (its own maximum is kept), and values behind
// the last position that any row sees are zeros, never the slot's old bytes. Multiplications and additions
// are written as intrinsics, so that no two copies of the code are contracted differently.

#include <cstdint>
#include <limits>

#include "common/units.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/numbers.cuh"
#include "kernels/cuda/reductions.cuh"

namespace poise::cuda {

inline constexpr int kAttentionThreads = 128;
inline constexpr int kTilePositions = 64;  // and the most query rows of a block of threads
inline constexpr int kWarpRows = 16;
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();
inline constexpr int kTileBlocks = kTilePositions / kBlockTokens;
inline constexpr int kTableTiles = 8;  // tiles ahead of which the blocks' places are known

inline constexpr int kTableBytes = kTableTiles * kTileBlocks * 8;

// Sizes that follow from the width of a head, kDim ≥ head_dim, a multiple of 16.
template <int kDim>
struct TileSizes {
  static_assert(kDim % 16 == 0 && kDim <= 256);
  static constexpr int kChunks = kDim / 8;  // of 16 bytes, in a position's key or value
  // An odd number of chunks from row to row: eight rows of a matrix lie in different banks.
  static constexpr int kPitch = 16 * (kChunks + 1);
  static constexpr int kEntryBytes = kTilePositions * kPitch;
  // 99 KiB: what a block may have on any GPU since 8.0, and two of them on a multiprocessor of 9.0.
  static constexpr int kEntriesThatFit = (99 * 1024 - kTableBytes) / kEntryBytes;
  static constexpr int kEntries = kEntriesThatFit < 8 ? kEntriesThatFit : 8;
  static_assert(kEntries >= 2 && kEntries / 2 + 1 <= kTableTiles);
  static constexpr int kSharedBytes = kEntries * kEntryBytes;
};

// Where a block of threads works.
struct AttentionPlace {
  AttentionSequence sequence;
  int head, kv_head;
  int first_row, rows;  // of the sequence's new tokens; rows ≤ 64
  int end;              // positions that its last row sees

  // Tiles of rows, then heads, then sequences: neighbours share keys and values in L2. The last
  // tile sees most and goes first.
  __device__ AttentionPlace(const Attention& op, unsigned row_tiles) {
    const unsigned item = blockIdx.x / row_tiles;
    const unsigned tile = row_tiles - 1 - blockIdx.x % row_tiles;
    head = static_cast<int>(item % static_cast<unsigned>(op.heads));
    kv_head = head / (op.heads / op.kv_heads);
    sequence = op.sequences[item / static_cast<unsigned>(op.heads)];
    first_row = static_cast<int>(tile) * kTilePositions;
    rows = min(kTilePositions, sequence.new_tokens - first_row);
    end = sequence.context + first_row + rows;
  }
};

// The ring of keys and values: entry 2·i holds the keys of tile i, entry 2·i + 1 its values.
template <typename T, int kDim>
class ContextRing {
  using Sizes = TileSizes<kDim>;

 public:
  __device__ ContextRing(const Attention& op, const AttentionPlace& place, char* shared,
                         const char* (*table)[kTileBlocks])
      : blocks_(op.blocks + place.sequence.first_block),
        slots_{static_cast<const char*>(op.slots[0]), static_cast<const char*>(op.slots[1]),
               static_cast<const char*>(op.slots[2])},
        token_bytes_(std::int64_t{2} * op.kv_heads * op.head_dim * sizeof(T)),
        head_bytes_(std::int64_t{place.kv_head} * op.head_dim * sizeof(T)),
        value_bytes_(std::int64_t{op.kv_heads} * op.head_dim * sizeof(T)),
        shared_(shared_address(shared)),
        table_(table),
        end_(place.end),
        chunks_(op.head_dim / 8),
        tiles_((place.end + kTilePositions - 1) / kTilePositions) {}

  __device__ int tiles() const { return tiles_; }

  // Looks up the first tiles' blocks and starts the first copies. All threads.
  __device__ void begin() {
    if (threadIdx.x < kTableTiles * kTileBlocks) {
      const int tile = threadIdx.x / kTileBlocks;
      const int block = threadIdx.x % kTileBlocks;
      table_[tile][block] = place_of(tile * kTileBlocks + block);
    }
    __syncthreads();
#pragma unroll
    for (int entry = 0; entry < Sizes::kEntries - 1; ++entry) {
      copy(entry);
    }
  }

  // Entry n (the next in order) is there for all threads; starts the copy that may take the place
  // of entry n - 1, which nobody needs any more. All threads.
  __device__ SharedAddress next(int n) {
    wait_copy_groups<Sizes::kEntries - 2>();
    __syncthreads();
    copy(n + Sizes::kEntries - 1);
    return shared_ + n % Sizes::kEntries * Sizes::kEntryBytes;
  }

  // A block's place is looked up while a tile is computed, and kept when it is done with.
  __device__ const char* look_up(int tile) const {
    return threadIdx.x < kTileBlocks ? place_of((tile + kTableTiles) * kTileBlocks + threadIdx.x)
                                     : nullptr;
  }
  __device__ void keep(int tile, const char* place) {
    if (threadIdx.x < kTileBlocks) {
      table_[tile % kTableTiles][threadIdx.x] = place;
    }
  }

 private:
  // The first token's key of this head in a block of the sequence.
  __device__ const char* place_of(int block) const {
    if (block * kBlockTokens >= end_) {
      return slots_[0];  // never read
    }
    const ContextBlock at = blocks_[block];
    const char* slots = at.buffer == 0 ? slots_[0] : at.buffer == 1 ? slots_[1] : slots_[2];
    return slots + at.slot * (kBlockTokens * token_bytes_) + head_bytes_;
  }

  __device__ void copy(int entry) {
    const int tile = entry / 2;
    if (tile < tiles_) {
      const SharedAddress to = shared_ + entry % Sizes::kEntries * Sizes::kEntryBytes;
      const std::int64_t offset = entry % 2 == 0 ? 0 : value_bytes_;
      constexpr int kPieces = kTilePositions * Sizes::kChunks;
      static_assert(kPieces % kAttentionThreads == 0);
#pragma unroll 4
      for (int i = 0; i < kPieces / kAttentionThreads; ++i) {
        const int piece = i * kAttentionThreads + static_cast<int>(threadIdx.x);
        const int position = piece / Sizes::kChunks;
        const int chunk = piece % Sizes::kChunks;
        const bool exists = tile * kTilePositions + position < end_ && chunk < chunks_;
        const char* from = table_[tile % kTableTiles][position / kBlockTokens] + offset +
                           position % kBlockTokens * token_bytes_ + 16 * chunk;
        copy_16_async(to + static_cast<unsigned>(position * Sizes::kPitch + 16 * chunk),
                      exists ? from : slots_[0], exists);
      }
    }
    end_copy_group();
  }

  const ContextBlock* const blocks_;
  const char* const slots_[3];
  const std::int64_t token_bytes_, head_bytes_, value_bytes_;
  const SharedAddress shared_;
  const char* (*const table_)[kTileBlocks];  // (kTableTiles, kTileBlocks), shared
  const int end_, chunks_, tiles_;
};

// Sixteen rows of a warp on their way through the softmax. Lane 4·g + t holds of rows g and g + 8 the
// columns 2t and 2t + 1 of every eight.
template <typename T, int kDim>
class WarpRows {
  using Sizes = TileSizes<kDim>;
  static constexpr int kScoreTiles = kTilePositions / 8;

 public:
  __device__ WarpRows(const Attention& op, const AttentionPlace& place)
      : lane_(threadIdx.x % kWarp),
        first_(turn() * kWarpRows),
        rows_(min(kWarpRows, place.rows - first_)),
        position_(place.sequence.context + place.first_row + first_),
        factor_(op.scale * 1.4426950408889634f) {
    const std::int64_t first_row = place.sequence.first_row + place.first_row + first_;
    stride_ = std::int64_t{op.heads} * op.head_dim;
    start_ = (first_row + lane_ / 4) * stride_ + std::int64_t{place.head} * op.head_dim +
             2 * (lane_ % 4);
    const T* q = static_cast<const T*>(op.q) + start_;
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const int column = 16 * k + part / 2 * 8;
        const bool exists = has_row(part % 2) && column < op.head_dim;
        q_[k][part] =
            exists ? *reinterpret_cast<const std::uint32_t*>(q + part % 2 * 8 * stride_ + column)
                   : 0;
      }
    }
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        sums_[n][i] = 0;
      }
    }
  }

  // Whether any of the rows sees a position of the tile.
  __device__ bool see(int tile) const {
    return rows_ > 0 && tile * kTilePositions < position_ + rows_;
  }

  // Scores of the tile, then its weights; maximum, denominator and sums follow.
  __device__ void weigh(int tile, SharedAddress keys) {
    float scores[kScoreTiles][4];
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        scores[n][i] = 0;
      }
    }
    // Matrices: 8 positions × 8 columns; positions + 8 in the upper half of the lanes.
    const SharedAddress row =
        keys +
        static_cast<unsigned>((lane_ / 16 * 8 + lane_ % 8) * Sizes::kPitch + lane_ / 8 % 2 * 16);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kScoreTiles; n += 2) {
        std::uint32_t b[4];
        load_matrices(b, row + static_cast<unsigned>(8 * n * Sizes::kPitch + 32 * k));
        multiply_add<T>(scores[n], q_[k], b[0], b[1]);
        multiply_add<T>(scores[n + 1], q_[k], b[2], b[3]);
      }
    }
    const int first = tile * kTilePositions;
    if (first + kTilePositions > position_ + 1) {  // the first row does not see all of it
#pragma unroll
      for (int n = 0; n < kScoreTiles; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int at = first + 8 * n + 2 * (lane_ % 4) + i % 2;
          if (at > position_ + lane_ / 4 + i / 2 * 8) {
            scores[n][i] = -kInfinity;
          }
        }
      }
    }
    if (rows_ > 8) {
      weigh_row(0, scores);
      weigh_row(1, scores);
    } else {  // a decoding row is alone
      weigh_row(0, scores);
    }
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      weights_[n / 2][n % 2 * 2] = pack<T>(scores[n][0], scores[n][1]);
      weights_[n / 2][n % 2 * 2 + 1] = pack<T>(scores[n][2], scores[n][3]);
    }
  }

  __device__ void add_values(SharedAddress values) {
    // Matrices: 8 positions × 8 columns, transposed; columns + 8 in the upper half of the lanes.
    const SharedAddress row =
        values + static_cast<unsigned>(lane_ % 16 * Sizes::kPitch + lane_ / 16 * 16);
#pragma unroll
    for (int k = 0; k < kTilePositions / 16; ++k) {
#pragma unroll
      for (int n = 0; n < kDim / 8; n += 2) {
        std::uint32_t b[4];
        load_matrices_transposed(b, row + static_cast<unsigned>(16 * k * Sizes::kPitch + 16 * n));
        multiply_add<T>(sums_[n], weights_[k], b[0], b[1]);
        multiply_add<T>(sums_[n + 1], weights_[k], b[2], b[3]);
      }
    }
  }

  __device__ void write_out(const Attention& op) {
    T* out = static_cast<T*>(op.out) + start_;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float total = denominator_[half];
      total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, 1));
      total = __fadd_rn(total, __shfl_xor_sync(kAllLanes, total, 2));
      const float share = __fdiv_rn(1.0f, total);
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        if (has_row(half) && 8 * n < op.head_dim) {
          *reinterpret_cast<std::uint32_t*>(out + half * 8 * stride_ + 8 * n) = pack<T>(
              __fmul_rn(sums_[n][2 * half], share), __fmul_rn(sums_[n][2 * half + 1], share));
        }
      }
    }
  }

 private:
  // Which sixteen rows this warp takes. Where only one of the four has any, it should not be the
  // same one in the blocks beside it: warp w of every block runs on the same quarter of its
  // multiprocessor.
  static __device__ int turn() {
    const unsigned shift = blockIdx.x * 2654435769u >> 30;
    return static_cast<int>((threadIdx.x / kWarp + shift) % (kAttentionThreads / kWarp));
  }

  __device__ bool has_row(int half) const { return lane_ / 4 + 8 * half < rows_; }

  __device__ __forceinline__ void weigh_row(const int half, float (&scores)[kScoreTiles][4]) {
    const int a = 2 * half;
    const int b = 2 * half + 1;
    float largest = maximum_[half];
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      largest = fmaxf(largest, fmaxf(scores[n][a], scores[n][b]));
    }
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(kAllLanes, largest, 2));
    // Exactly 1 where the maximum stays; 0 in the first tile, where it was minus infinity.
    const float shrink = power_of_two(__fmul_rn(__fsub_rn(maximum_[half], largest), factor_));
    maximum_[half] = largest;
    const float base = -__fmul_rn(largest, factor_);
    float total = 0;
#pragma unroll
    for (int n = 0; n < kScoreTiles; ++n) {
      scores[n][a] = power_of_two(__fmaf_rn(scores[n][a], factor_, base));
      scores[n][b] = power_of_two(__fmaf_rn(scores[n][b], factor_, base));
      total = __fadd_rn(total, __fadd_rn(scores[n][a], scores[n][b]));
    }
    denominator_[half] = __fmaf_rn(denominator_[half], shrink, total);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      sums_[n][a] = __fmul_rn(sums_[n][a], shrink);
      sums_[n][b] = __fmul_rn(sums_[n][b], shrink);
    }
  }

  const int lane_, first_, rows_;  // rows_ ≤ 0: this warp has none
  const int position_;             // of the first row; row i sees positions 0 .. position_ + i
  const float factor_;             // scale · log2 e
  std::int64_t start_, stride_;    // of this lane's first number in q and out; from row to row
  std::uint32_t q_[kDim / 16][4];
  std::uint32_t weights_[kTilePositions / 16][4];
  float sums_[kDim / 8][4];
  float maximum_[2] = {-kInfinity, -kInfinity};
  float denominator_[2] = {0, 0};
};

template <typename T, int kDim>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_kernel(const Attention op, unsigned row_tiles) {
  extern __shared__ __align__(16) char shared[];
  __shared__ const char* table[kTableTiles][kTileBlocks];
  const AttentionPlace place(op, row_tiles);
  if (place.rows <= 0) {
    return;
  }
  ContextRing<T, kDim> ring(op, place, shared, table);
  ring.begin();
  WarpRows<T, kDim> rows(op, place);
  for (int tile = 0; tile < ring.tiles(); ++tile) {
    const char* later = ring.look_up(tile);
    const bool see = rows.see(tile);
    const SharedAddress keys = ring.next(2 * tile);
    if (see) {
      rows.weigh(tile, keys);
    }
    const SharedAddress values = ring.next(2 * tile + 1);
    if (see) {
      rows.add_values(values);
    }
    ring.keep(tile, later);
  }
  wait_copy_groups<0>();
  rows.write_out(op);
}

template <typename T, int kDim>
void attend(const Attention& op, cudaStream_t stream) {
  constexpr std::size_t kShared = TileSizes<kDim>::kSharedBytes;
  // One device a process: once is enough.
  static const bool allowed = (allow_shared("attend", &attention_kernel<T, kDim>, kShared), true);
  static_cast<void>(allowed);
  const std::int64_t row_tiles = ceil_div(op.max_new_tokens, kTilePositions);
  launch("attend", &attention_kernel<T, kDim>,
         {.blocks = row_tiles * op.heads * op.sequence_count,
          .threads = kAttentionThreads,
          .shared_bytes = kShared},
         stream, op, static_cast<unsigned>(row_tiles));
}

// The narrowest instance that holds a head. REQUIRES: head_dim a multiple of 8, at most 256.
template <typename T>
void attend_with_tiles(const Attention& op, cudaStream_t stream) {
  if (op.head_dim <= 32) {
    attend<T, 32>(op, stream);
  } else if (op.head_dim <= 64) {
    attend<T, 64>(op, stream);
  } else if (op.head_dim <= 80) {
    attend<T, 80>(op, stream);
  } else if (op.head_dim <= 96) {
    attend<T, 96>(op, stream);
  } else if (op.head_dim <= 128) {
    attend<T, 128>(op, stream);
  } else if (op.head_dim <= 160) {
    attend<T, 160>(op, stream);
  } else if (op.head_dim <= 192) {
    attend<T, 192>(op, stream);
  } else {
    attend<T, 256>(op, stream);
  }
}

}  // namespace poise::cuda
