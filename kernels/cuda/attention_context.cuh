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
#include "kernels/cuda/kv/codes.cuh"
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

// What the slices of one row gave, in the shared memory of the block that merges them.
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
  // 99 KiB: what a block may have on any GPU since 8.0.
  static constexpr int kEntriesThatFit =
      (99 * 1024 - kTableBytes - kScoreBytes - static_cast<int>(sizeof(SliceResults<kDim>))) /
      kEntryBytes;
  static constexpr int kEntries = kEntriesThatFit < 8 ? kEntriesThatFit : 8;
  static_assert(kEntries >= 2 && kEntries / 2 + 1 <= kTableTiles);
  static constexpr int kSharedBytes = kEntries * kEntryBytes;
  // Rows whose slices a block of a cluster can keep: two blocks, of 113 KiB each, share a
  // multiprocessor of 9.0. Of sixteen rows a block of the largest cluster has two.
  static constexpr int kResultRows = (113 * 1024 - kTableBytes - kScoreBytes - kSharedBytes) /
                                     static_cast<int>(sizeof(SliceResults<kDim>));
  static_assert(kResultRows * kSlices >= kWarpRows);
  // Positions that the threads copy at once, a vector each: a part of a block.
  static constexpr int kAtOnce = kVectors > 16 ? 4 : kVectors > 8 ? 8 : 16;
  static_assert(kAtOnce * kVectors <= kAttentionThreads && kBlockTokens % kAtOnce == 0);
};

// How the work is laid out over thread blocks: blocks of a cluster, then tiles of rows, key-value heads,
// sequences. Neighbours share keys and values in L2.
struct AttentionGrid {
  unsigned row_tiles;
  unsigned cluster_bits;  // a cluster has 2^cluster_bits blocks
  unsigned group;         // query heads of a key-value head
  KvRowLayout layout;     // of quantised blocks
};

// Where a block of threads works. Its rows are (new token, query head of the group) pairs, the heads of
// a token side by side: row r is of token r / group.
struct AttentionPlace {
  AttentionSequence sequence;
  int kv_head, group;
  int first_row, rows;  // of the sequence's; rows ≤ tile_rows
  int begin, end;       // positions that its rows see
  int rank, cluster;    // it takes every cluster-th slice, the first block that of `begin`

  // The last tile sees most and goes first.
  __device__ AttentionPlace(const Attention& op, const AttentionGrid& grid)
      : AttentionPlace(op, static_cast<int>(grid.group),
                       (blockIdx.x >> grid.cluster_bits) / grid.row_tiles,
                       grid.row_tiles - 1 - (blockIdx.x >> grid.cluster_bits) % grid.row_tiles,
                       kTilePositions) {
    cluster = 1 << grid.cluster_bits;
    rank = static_cast<int>(blockIdx.x) & (cluster - 1);
  }

  // `item`: counts the key-value heads of the first sequence, then of the next. The tile has tile_rows rows.
  __device__ AttentionPlace(const Attention& op, int of_group, unsigned item, unsigned tile,
                            int tile_rows)
      : group(of_group), rank(0), cluster(1) {
    const auto kv_heads = static_cast<unsigned>(op.kv_heads);
    kv_head = static_cast<int>(item % kv_heads);
    sequence = op.sequences[item / kv_heads];
    first_row = static_cast<int>(tile) * tile_rows;
    rows = min(tile_rows, sequence.new_tokens * group - first_row);
    begin = first_seen(position_of(0), op.window);
    end = position_of(rows - 1) + 1;
  }

  __device__ int token_of(int row) const {
    return static_cast<int>(static_cast<unsigned>(first_row + row) / static_cast<unsigned>(group));
  }
  __device__ int position_of(int row) const { return sequence.context + token_of(row); }
  // Of the row's first number in q and out.
  __device__ std::int64_t offset_of(const Attention& op, int row) const {
    const int token = token_of(row);
    const int head = kv_head * group + first_row + row - token * group;
    return (std::int64_t{sequence.first_row + token} * op.heads + head) * op.head_dim;
  }

  __device__ bool has_work() const {
    return rows > 0 && (begin / kChunkPositions + rank) * kChunkPositions < end;
  }
  // In a cluster, the slices of row r meet in block r % cluster.
  __device__ bool merges() const { return cluster > 1 && rank < rows; }
  __device__ TileWalk walk() const {
    return {(begin / kChunkPositions + rank) & (cluster - 1), cluster, begin / kTilePositions,
            (end + kTilePositions - 1) / kTilePositions};
  }
};

// The ring of keys and values. Tiles are counted as `place.walk()` takes them: entry 2·i holds the keys
// of the i-th tile, entry 2·i + 1 its values. Of quantised blocks (kCodes) an entry gets the numbers:
// each thread reads codes, and writes what they stand for where else a copy would.
template <typename T, int kDim, bool kCodes>
class ContextRing {
  using Sizes = TileSizes<kDim>;

 public:
  __device__ ContextRing(const Attention& op, const AttentionGrid& grid,
                         const AttentionPlace& place, char* shared,
                         const char* (*table)[kTileBlocks])
      : blocks_(op.blocks + place.sequence.first_block),
        slots_{static_cast<const char*>(op.slots[0]), static_cast<const char*>(op.slots[1]),
               static_cast<const char*>(op.slots[2])},
        token_bytes_(kCodes ? grid.layout.row
                            : std::int64_t{2} * op.kv_heads * op.head_dim * sizeof(T)),
        head_bytes_(place.kv_head *
                    (kCodes ? grid.layout.codes : op.head_dim * std::int64_t{sizeof(T)})),
        value_bytes_(op.kv_heads *
                     (kCodes ? grid.layout.codes : op.head_dim * std::int64_t{sizeof(T)})),
        codes_(op, grid.layout, place.kv_head),
        shared_(shared_address(shared)),
        table_(table),
        begin_(place.begin),
        end_(place.end),
        row_(static_cast<int>(threadIdx.x) / Sizes::kVectors),
        vector_(static_cast<int>(threadIdx.x) % Sizes::kVectors),
        exists_(vector_ < op.head_dim / 8),
        looked_up_(place.walk()),
        copied_(place.walk()) {}

  // Looks up the first tiles' blocks and starts the first copies. All threads.
  __device__ void begin() {
    // A context that is seen from its first position on begins with a whole chunk, and the first copies
    // are of it: they need not wait for the walk. Where the chunk ends early it is the context's last,
    // and no tile follows.
    static_assert((Sizes::kEntries - 1) / 2 < kChunkTiles);
    const bool at_once = begin_ == 0;
    const int mine = threadIdx.x / kTileBlocks;
    const int block = threadIdx.x % kTileBlocks;
    int tile = at_once ? looked_up_.tile() + mine : walk_to(mine);
    if (mine < (at_once ? kChunkTiles : kTableTiles)) {
      table_[mine][block] = place_of(tile * kTileBlocks + block);
    }
    __syncthreads();
#pragma unroll
    for (int entry = 0; entry < Sizes::kEntries - 1; ++entry) {
      copy(entry);
    }
    if (at_once) {
      tile = walk_to(mine);
      if (mine >= kChunkTiles && mine < kTableTiles) {
        table_[mine][block] = place_of(tile * kTileBlocks + block);
      }
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
  // The i-th tile, of those that the table has room for; what follows them is looked up next.
  __device__ int walk_to(int wanted) {
    int tile = 0;
#pragma unroll 1
    for (int i = 0; i < kTableTiles; ++i) {
      if (i == wanted) {
        tile = looked_up_.tile();
      }
      looked_up_.step();
    }
    return tile;
  }

  // The first token's key of this head in a block of the sequence (or its codes).
  __device__ const char* place_of(int block) const {
    if (block * kBlockTokens >= end_ || (block + 1) * kBlockTokens <= begin_) {
      return slots_[0];  // never read
    }
    const ContextBlock at = blocks_[block];
    const char* slots = at.buffer == 0 ? slots_[0] : at.buffer == 1 ? slots_[1] : slots_[2];
    return slots + at.slot * (kBlockTokens * token_bytes_) + head_bytes_;
  }

  // Entries in order, each once.
  __device__ void copy(int entry) {
    if constexpr (kCodes) {
      dequantize(entry);
    } else {
      copy_plain(entry);
    }
    if (entry % 2 == 1) {
      copied_.step();
    }
    end_copy_group();
  }

  __device__ void copy_plain(int entry) {
    if (!copied_.done() && row_ < Sizes::kAtOnce) {
      // Positions that are seen, from this thread's first on.
      const int skip = begin_ - copied_.tile() * kTilePositions - row_;
      const unsigned seen = exists_ ? static_cast<unsigned>(end_ - begin_) : 0u;
      const SharedAddress to = shared_ + entry % Sizes::kEntries * Sizes::kEntryBytes +
                               static_cast<unsigned>(row_ * Sizes::kPitch + 16 * vector_);
      const char* const* blocks = table_[entry / 2 % kTableTiles];
      const std::int64_t offset =
          row_ * token_bytes_ + 16 * vector_ + (entry % 2 == 0 ? 0 : value_bytes_);
#pragma unroll
      for (int at = 0; at < kTilePositions; at += Sizes::kAtOnce) {
        copy_16_async(to + static_cast<unsigned>(at * Sizes::kPitch),
                      blocks[at / kBlockTokens] + offset + at % kBlockTokens * token_bytes_,
                      static_cast<unsigned>(at - skip) < seen);
      }
    }
  }

  // The same for codes: eight of them a vector.
  __device__ void dequantize(int entry) {
    if (copied_.done() || row_ >= Sizes::kAtOnce) {
      return;
    }
    const int skip = begin_ - copied_.tile() * kTilePositions - row_;
    const unsigned seen = exists_ ? static_cast<unsigned>(end_ - begin_) : 0u;
    const SharedAddress to = shared_ + entry % Sizes::kEntries * Sizes::kEntryBytes +
                             static_cast<unsigned>(row_ * Sizes::kPitch + 16 * vector_);
    const char* const* blocks = table_[entry / 2 % kTableTiles];
    const std::int64_t value = entry % 2 == 0 ? 0 : value_bytes_;
#pragma unroll
    for (int at = 0; at < kTilePositions; at += Sizes::kAtOnce) {
      std::uint32_t words[4] = {0, 0, 0, 0};
      if (static_cast<unsigned>(at - skip) < seen) {
        const char* key = blocks[at / kBlockTokens] + (at % kBlockTokens + row_) * token_bytes_;
        codes_.eight(words, key + value, key, entry % 2, vector_);
      }
      store_16(to + static_cast<unsigned>(at * Sizes::kPitch), words);
    }
  }

  const ContextBlock* const blocks_;
  const char* const slots_[3];
  const std::int64_t token_bytes_, head_bytes_, value_bytes_;
  const HeadCodes<T> codes_;  // kCodes
  const SharedAddress shared_;
  const char* (*const table_)[kTileBlocks];  // (kTableTiles, kTileBlocks), shared
  const int begin_, end_;
  const int row_, vector_;       // of a tile, that this thread copies first
  const bool exists_;            // the vector, in a head of this width
  TileWalk looked_up_, copied_;  // the next tile to be
};

}  // namespace poise::cuda
