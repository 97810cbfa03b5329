#pragma once
// What a block of threads attends, and how its context comes: tiles of 64 positions through a ring in
// shared memory, copies always under way while a tile is computed.
//
// Context is cut into chunks of 256 positions at multiples of 256, and chunk c is of slice c % 8. Tiles
// are taken slice by slice, of each slice its chunks in order. Blocks of a cluster share the slices:
// however many blocks there are, the slices are the same, and so is what each of them holds.

#include <cstdint>

#include "kernels/cuda/attention_blocks.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/mma.cuh"

namespace poise::cuda {

inline constexpr int kAttentionThreads = 128;
inline constexpr int kWarpRows = 16;
inline constexpr int kTileBlocks = kTilePositions / kBlockTokens;
inline constexpr int kTableTiles = 8;  // tiles ahead of which the blocks' places are known

inline constexpr int kTableBytes = kTableTiles * kTileBlocks * 8;
// Scores of a tile on their way from warp to warp. With this pitch, two numbers of each of four rows
// lie in different banks.
inline constexpr int kScorePitch = kTilePositions + 8;
inline constexpr int kScoreBytes = kWarpRows * kScorePitch * 4;

// What the slices of one row gave, in the shared memory of the cluster's first block.
template <int kDim>
struct SliceResults {
  float maximum[kSlices];
  float denominator[kSlices];
  float sums[kSlices][kDim];
};

// Sizes that follow from the width of a head, kDim ≥ head_dim, a multiple of 16.
template <int kDim>
struct TileSizes {
  static_assert(kDim % 16 == 0 && kDim <= 256);
  static constexpr int kVectors = kDim / 8;  // of 16 bytes, in a position's key or value
  // An odd number of vectors from row to row: eight rows of a matrix lie in different banks.
  static constexpr int kPitch = 16 * (kVectors + 1);
  static constexpr int kEntryBytes = kTilePositions * kPitch;
  // 99 KiB: what a block may have on any GPU since 8.0, and two of them on a multiprocessor of 9.0.
  static constexpr int kEntriesThatFit =
      (99 * 1024 - kTableBytes - kScoreBytes - static_cast<int>(sizeof(SliceResults<kDim>))) /
      kEntryBytes;
  static constexpr int kEntries = kEntriesThatFit < 8 ? kEntriesThatFit : 8;
  static_assert(kEntries >= 2 && kEntries / 2 + 1 <= kTableTiles);
  static constexpr int kSharedBytes = kEntries * kEntryBytes;
  // Positions that the threads copy at once, a vector each: a part of a block.
  static constexpr int kAtOnce = kVectors > 16 ? 4 : kVectors > 8 ? 8 : 16;
  static_assert(kAtOnce * kVectors <= kAttentionThreads && kBlockTokens % kAtOnce == 0);
};

// The tiles of slices first, first + stride, …, in order.
class TileWalk {
 public:
  __device__ TileWalk(int first, int stride, int tiles)
      : stride_(stride), tiles_(tiles), slice_(first), tile_(first * kChunkTiles) {}

  __device__ bool done() const { return tile_ >= tiles_; }
  __device__ int slice() const { return slice_; }
  __device__ int tile() const { return tile_; }  // behind the last one when done

  __device__ void step() {
    ++tile_;
    if (tile_ % kChunkTiles == 0) {
      tile_ += (kSlices - 1) * kChunkTiles;
    }
    if (tile_ >= tiles_) {
      slice_ += stride_;
      tile_ = slice_ < kSlices ? slice_ * kChunkTiles : tiles_;
    }
  }

 private:
  const int stride_, tiles_;
  int slice_, tile_;
};

// How the work is laid out over thread blocks: blocks of a cluster, then tiles of rows, heads,
// sequences. Neighbours share keys and values in L2.
struct AttentionGrid {
  unsigned row_tiles;
  unsigned cluster_bits;  // a cluster has 2^cluster_bits blocks
  unsigned sharing;       // query heads of a key-value head
};

// Where a block of threads works.
struct AttentionPlace {
  AttentionSequence sequence;
  int head, kv_head;
  int first_row, rows;  // of the sequence's new tokens; rows ≤ 64
  int end;              // positions that its last row sees
  int rank, cluster;    // it takes slices rank, rank + cluster, …

  // The last tile sees most and goes first.
  __device__ AttentionPlace(const Attention& op, const AttentionGrid& grid)
      : cluster(1 << grid.cluster_bits) {
    rank = static_cast<int>(blockIdx.x) & (cluster - 1);
    const unsigned block = blockIdx.x >> grid.cluster_bits;
    const unsigned item = block / grid.row_tiles;
    const unsigned tile = grid.row_tiles - 1 - block % grid.row_tiles;
    const unsigned heads = static_cast<unsigned>(op.heads);
    head = static_cast<int>(item % heads);
    kv_head = static_cast<int>(item % heads / grid.sharing);
    sequence = op.sequences[item / heads];
    first_row = static_cast<int>(tile) * kTilePositions;
    rows = min(kTilePositions, sequence.new_tokens - first_row);
    end = sequence.context + first_row + rows;
  }

  __device__ bool has_work() const { return rows > 0 && rank * kChunkPositions < end; }
  __device__ TileWalk walk() const {
    return {rank, cluster, (end + kTilePositions - 1) / kTilePositions};
  }
};

// The ring of keys and values. Tiles are counted as `place.walk()` takes them: entry 2·i holds the keys
// of the i-th tile, entry 2·i + 1 its values.
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
        row_(static_cast<int>(threadIdx.x) / Sizes::kVectors),
        vector_(static_cast<int>(threadIdx.x) % Sizes::kVectors),
        exists_(vector_ < op.head_dim / 8),
        looked_up_(place.walk()),
        copied_(place.walk()) {}

  // Looks up the first tiles' blocks and starts the first copies. All threads.
  __device__ void begin() {
    // The first copies are of the first chunk: they need not wait for the walk. Where the chunk ends
    // early it is the context's last, and no tile follows.
    static_assert((Sizes::kEntries - 1) / 2 < kChunkTiles);
    const int mine = threadIdx.x / kTileBlocks;
    const int block = threadIdx.x % kTileBlocks;
    if (mine < kChunkTiles) {
      table_[mine][block] = place_of((looked_up_.tile() + mine) * kTileBlocks + block);
    }
    __syncthreads();
#pragma unroll
    for (int entry = 0; entry < Sizes::kEntries - 1; ++entry) {
      copy(entry);
    }
    int tile = 0;
#pragma unroll
    for (int i = 0; i < kTableTiles; ++i) {
      if (i == mine) {
        tile = looked_up_.tile();
      }
      looked_up_.step();
    }
    if (mine >= kChunkTiles && mine < kTableTiles) {
      table_[mine][block] = place_of(tile * kTileBlocks + block);
    }
  }

  // Waits until all threads have entry n (the next in order), and starts the copy that replaces entry
  // n - 1, which is no longer needed. All threads call it.
  __device__ SharedAddress next(int n) {
    wait_copy_groups<Sizes::kEntries - 2>();
    __syncthreads();
    copy(n + Sizes::kEntries - 1);
    return shared_ + n % Sizes::kEntries * Sizes::kEntryBytes;
  }

  // Looks up where a later tile's blocks are while the i-th tile is computed, and keeps the result when
  // that tile is done. Threads take turns.
  __device__ const char* look_up() {
    const int tile = looked_up_.tile();
    looked_up_.step();
    return threadIdx.x < kTileBlocks ? place_of(tile * kTileBlocks + threadIdx.x) : nullptr;
  }
  __device__ void keep(int i, const char* place) {
    if (threadIdx.x < kTileBlocks) {
      table_[i % kTableTiles][threadIdx.x] = place;
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

  // Entries in order, each once.
  __device__ void copy(int entry) {
    if (!copied_.done() && row_ < Sizes::kAtOnce) {
      // Positions from this thread's first on.
      const int left = exists_ ? end_ - copied_.tile() * kTilePositions - row_ : 0;
      const SharedAddress to = shared_ + entry % Sizes::kEntries * Sizes::kEntryBytes +
                               static_cast<unsigned>(row_ * Sizes::kPitch + 16 * vector_);
      const char* const* blocks = table_[entry / 2 % kTableTiles];
      const std::int64_t offset =
          row_ * token_bytes_ + 16 * vector_ + (entry % 2 == 0 ? 0 : value_bytes_);
#pragma unroll
      for (int at = 0; at < kTilePositions; at += Sizes::kAtOnce) {
        copy_16_async(to + static_cast<unsigned>(at * Sizes::kPitch),
                      blocks[at / kBlockTokens] + offset + at % kBlockTokens * token_bytes_,
                      at < left);
      }
    }
    if (entry % 2 == 1) {
      copied_.step();
    }
    end_copy_group();
  }

  const ContextBlock* const blocks_;
  const char* const slots_[3];
  const std::int64_t token_bytes_, head_bytes_, value_bytes_;
  const SharedAddress shared_;
  const char* (*const table_)[kTileBlocks];  // (kTableTiles, kTileBlocks), shared
  const int end_;
  const int row_, vector_;       // of a tile, that this thread copies first
  const bool exists_;            // the vector, in a head of this width
  TileWalk looked_up_, copied_;  // the next tile to be
};

}  // namespace poise::cuda
