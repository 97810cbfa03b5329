#pragma once
// Attention of prompts on GPUs of compute capability 9.0: up to 128 rows of one (sequence, key-value
// head) in a block of threads. One warpgroup copies queries, and keys and values into a ring in shared memory; two
// others compute, 64 rows each, with products that four warps make together (wgmma.cuh). They read a tile once
// for 64 rows, where each warp of attention_tiles.cuh reads it for its sixteen. The softmax over a tile needs about as
// long as its products: each group's runs beside its own products of the tile before, and beside the other group's.
//
// A row has the bits that attention_tiles.cuh gives it: the same tiles and slices, products in the same
// order, and everything between them is the same code (WarpRows). That both kinds of tensor core
// product add alike is an assumption on the GPU, which tests hold (tests/kernels/cuda/attention_test.cpp).

#include <algorithm>
#include <cstdint>

#include "common/units.h"
#include "kernels/cuda/attention_context.cuh"
#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/prompts/wgmma.cuh"

namespace poise::cuda {

inline constexpr int kGroupThreads = 128;  // of a warpgroup
inline constexpr int kGroupRows = 64;      // whose products it makes
inline constexpr int kComputingGroups = 2;
inline constexpr int kComputingWarps = kComputingGroups * kGroupThreads / kWarp;
inline constexpr int kPromptRows = kComputingGroups * kGroupRows;
inline constexpr int kPromptThreads = (1 + kComputingGroups) * kGroupThreads;
inline constexpr int kCopyingWarps = kGroupThreads / kWarp;

template <int kDim>
struct PromptSizes {
  static_assert(kDim == 64 || kDim == 128);
  static constexpr int kVectors = kDim / 8;
  static constexpr int kColumnsBytes = kTilePositions * 128;     // 64 columns of a tile
  static constexpr int kEntryBytes = kDim / 64 * kColumnsBytes;  // its keys, or its values
  static constexpr int kTiles = 4;                               // in the ring
  static constexpr int kRingBytes = 2 * kTiles * kEntryBytes;
  static constexpr int kQueriesBytes = kComputingGroups * kEntryBytes;
  static constexpr int kMergedBytes = kComputingGroups * kGroupThreads * kDim / 8 * 16;
  static constexpr int kSharedBytes =  // the ring at a multiple of 1,024
      1024 + kRingBytes + kQueriesBytes + kMergedBytes;
  static constexpr int kRowsAtOnce = kWarp / kVectors;  // that a warp copies
};

#if POISE_HAS_WGMMA

// A warp's number, from one lane: so the compiler knows that it is the same in all.
__device__ __forceinline__ int same_in_warp(int number) {
  return __shfl_sync(kAllLanes, number, 0);
}

// The tiles of a place that no cluster shares.
__device__ __forceinline__ TileWalk walk_of(const AttentionPlace& place) {
  return {0, 1, same_in_warp(place.begin) / kTilePositions,
          (same_in_warp(place.end) + kTilePositions - 1) / kTilePositions};
}

// Slices already merged, of one thread's two rows.
struct MergedInShared {
  float4* sums;
  float maximum[2], denominator[2];

  static constexpr int kPitch =
      kComputingGroups * kGroupThreads * 16;  // bytes from one n to the next

  __device__ float4& sum(int n) { return sums[n * kComputingGroups * kGroupThreads]; }
  // The warp's own 512 bytes of sum(0); it has as many of each other sum.
  __device__ SharedAddress of_warp() const { return shared_address(sums - threadIdx.x % kWarp); }
};

// What the computing warpgroups read in shared memory: the queries of a place, and a ring of the keys and
// values of its tiles.
template <typename T, int kDim>
class PromptRing {
  using Sizes = PromptSizes<kDim>;
  static constexpr int kVectorNumbers = 8;
  static_assert(kTilePositions == kGroupRows);  // so an entry has room for a group's queries

 public:
  static constexpr int kBarriers = 3 * Sizes::kTiles + 2;

  __device__ PromptRing(char* shared, std::uint64_t* barriers)
      : shared_((shared_address(shared) + 1023u) & ~1023u),
        full_(shared_address(barriers)),
        empty_(full_ + 8 * Sizes::kTiles),
        queries_full_(empty_ + 16 * Sizes::kTiles),
        queries_empty_(queries_full_ + 8) {}

  // One thread; a barrier of all follows.
  __device__ void begin() const {
    for (unsigned tile = 0; tile < Sizes::kTiles; ++tile) {
      begin_barrier(full_ + 8 * tile, 2 * kWarp);
      begin_barrier(empty_ + 16 * tile, kComputingWarps);
      begin_barrier(empty_ + 16 * tile + 8, kComputingWarps);
    }
    begin_barrier(queries_full_, kGroupThreads);
    begin_barrier(queries_empty_, kComputingWarps);
  }

  // Whether tile n, counted over all places of the block, is there. The answer takes a while, so it is asked for early.
  __device__ bool has(unsigned n) const {
    return completed(full_ + 8 * (n % Sizes::kTiles), (n / Sizes::kTiles) & 1u);
  }
  // Waits until it is there, unless has() said so. Products see copies that the barrier has counted, without a fence
  // between the two: NVIDIA's CUTLASS relies on that, too (sm90_mma_multistage_gmma_ss_warpspecialized.hpp).
  __device__ void need(unsigned n, bool there = false) const {
    if (!there) {
      wait(full_ + 8 * (n % Sizes::kTiles), (n / Sizes::kTiles) & 1u);
    }
  }
  // Its keys; its values are kEntryBytes behind.
  __device__ SharedAddress at(unsigned n) const {
    return shared_ + n % Sizes::kTiles * (2 * Sizes::kEntryBytes);
  }
  // This warp needs tile n's keys, or its values, no longer.
  __device__ void leave_keys(unsigned n) const { leave(empty_ + 16 * (n % Sizes::kTiles)); }
  __device__ void leave_values(unsigned n) const { leave(empty_ + 16 * (n % Sizes::kTiles) + 8); }

  // The queries of a computing group, of the turn-th place.
  __device__ SharedAddress queries(unsigned turn, int group) const {
    wait(queries_full_, turn & 1u);
    return shared_ + static_cast<unsigned>(Sizes::kRingBytes + group * Sizes::kEntryBytes);
  }
  __device__ void leave_queries() const { leave(queries_empty_); }

  // The queries of the turn-th place, by the warpgroup that copies: each warp those of 32 rows.
  __device__ void fill_queries(const Attention& op, const AttentionPlace& place,
                               unsigned turn) const {
    constexpr int kAtOnce = Sizes::kRowsAtOnce;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int first = static_cast<int>(threadIdx.x) - lane;
    // Where the row with the lane's number begins, in vectors; -1: there is no such row.
    const int begin = first + lane < place.rows
                          ? static_cast<int>(place.offset_of(op, first + lane) / kVectorNumbers)
                          : -1;
    const int vector = lane % Sizes::kVectors;
    const bool exists = vector < op.head_dim / kVectorNumbers;
    const T* from = static_cast<const T*>(op.q) + kVectorNumbers * vector;
    const SharedAddress to =
        shared_ +
        static_cast<unsigned>(Sizes::kRingBytes + first / kGroupRows * Sizes::kEntryBytes) +
        place_of(first % kGroupRows + lane / Sizes::kVectors, vector);
    if (turn > 0) {
      wait(queries_empty_, (turn - 1) & 1u);
    }
#pragma unroll
    for (int i = 0; i < kWarp / kAtOnce; ++i) {
      const int row = kAtOnce * i + lane / Sizes::kVectors;
      const int at = __shfl_sync(kAllLanes, begin, row);
      // The bits of i and of the lane's own row do not meet.
      copy_16_async((to ^ static_cast<unsigned>(kAtOnce * i % 8 * 16)) +
                        static_cast<unsigned>(kAtOnce * i * 128),
                    from + std::int64_t{kVectorNumbers} * at, at >= 0 && exists);
    }
    arrive_after_copies(queries_full_);
  }

  // This warp copies the keys, or the values, of every second tile of the place, whose first is tile n. Returns the number
  // behind the last tile. Does not wait for its copies.
  __device__ unsigned fill(const Attention& op, const AttentionPlace& place, unsigned n) const {
    const unsigned warp = threadIdx.x / kWarp;
    const unsigned half = warp % 2;  // keys or values
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int vector = lane % Sizes::kVectors;
    const std::int64_t row_bytes = std::int64_t{2} * op.kv_heads * op.head_dim * sizeof(T);
    const std::int64_t offset =
        lane / Sizes::kVectors * row_bytes + half * row_bytes / 2 +
        std::int64_t{sizeof(T)} * (place.kv_head * op.head_dim + kVectorNumbers * vector);
    const SharedAddress to =
        shared_ + half * Sizes::kEntryBytes + place_of(lane / Sizes::kVectors, vector);
    const ContextBlock* blocks = op.blocks + place.sequence.first_block;
    const bool exists = vector < op.head_dim / kVectorNumbers;
    for (TileWalk walk = walk_of(place); !walk.done(); walk.step(), ++n) {
      if (n % 2 != warp / 2) {
        continue;
      }
      const unsigned slot = n % Sizes::kTiles;
      const int first = walk.tile() * kTilePositions;  // position
      if (n >= Sizes::kTiles) {
        wait(empty_ + 16 * slot + 8 * half, (n / Sizes::kTiles - 1) & 1u);
      }
      const SharedAddress into = to + slot * (2 * Sizes::kEntryBytes);
      if (first >= place.begin && first + kTilePositions <= place.end) {
        copy<false>(op, place, blocks, first, offset, row_bytes, into, exists);
      } else {
        copy<true>(op, place, blocks, first, offset, row_bytes, into, exists);
      }
      arrive_after_copies(full_ + 8 * slot);
    }
    return n;
  }

 private:
  static __device__ void leave(SharedAddress barrier) {
    if (threadIdx.x % kWarp == 0) {
      arrive(barrier);
    }
  }

  // Of a vector of a row, in an entry (SharedMatrix).
  static __device__ SharedAddress place_of(int row, int vector) {
    return static_cast<unsigned>(vector / 8 * Sizes::kColumnsBytes + row * 128 +
                                 (vector ^ row) % 8 * 16);
  }

  // A tile from position `first` on, `into` an entry. kEdge: the place does not see all of it; zeros for the rest.
  template <bool kEdge>
  __device__ __forceinline__ void copy(const Attention& op, const AttentionPlace& place,
                                       const ContextBlock* blocks, int first, std::int64_t offset,
                                       std::int64_t row_bytes, SharedAddress into,
                                       bool exists) const {
    constexpr int kRows = Sizes::kRowsAtOnce;
    ContextBlock at[kTileBlocks];
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      const int position = first + i * kBlockTokens;
      const bool seen = !kEdge || (position < place.end && position + kBlockTokens > place.begin);
      at[i] = seen ? blocks[first / kBlockTokens + i] : ContextBlock{};
    }
#pragma unroll
    for (int i = 0; i < kTileBlocks; ++i) {
      const void* slots = at[i].buffer == 0   ? op.slots[0]
                          : at[i].buffer == 1 ? op.slots[1]
                                              : op.slots[2];
      const char* from =
          static_cast<const char*>(slots) + at[i].slot * (kBlockTokens * row_bytes) + offset;
      int skip = place.begin - first - i * kBlockTokens -
                 static_cast<int>(threadIdx.x) % kWarp / Sizes::kVectors;
#pragma unroll
      for (int row = 0; row < kBlockTokens; row += kRows, from += kRows * row_bytes) {
        const bool seen = !kEdge || static_cast<unsigned>(row - skip) <
                                        static_cast<unsigned>(place.end - place.begin);
        // The lane's row of these has the number `row` added to its own: their bits do not meet.
        copy_16_async((into ^ static_cast<unsigned>(row % 8 * 16)) +
                          static_cast<unsigned>((i * kBlockTokens + row) * 128),
                      from, exists && seen);
      }
    }
  }

  const SharedAddress shared_, full_, empty_, queries_full_, queries_empty_;
};

// The computing groups begin their products in turn: while one's scores become weights, the tensor cores
// have the other's products. Each group calls both as often as the other.
__device__ __forceinline__ void wait_for_turn(int group) {
  asm volatile("bar.sync %0, 256;\n" ::"r"(2 + group) : "memory");
}
__device__ __forceinline__ void give_turn(int group) {  // to the other
  asm volatile("bar.arrive %0, 256;\n" ::"r"(3 - group) : "memory");
}

#endif

// How the work is laid out: places of `at_once` (sequence, key-value head) pairs, whose keys and values the
// L2 cache holds, the tiles that see most first; then the next pairs'.
struct PromptGrid {
  unsigned pairs, at_once, row_tiles, group;

  __device__ unsigned count() const { return pairs * row_tiles; }
  __device__ AttentionPlace place(const Attention& op, unsigned item) const {
    const unsigned first = item / (at_once * row_tiles) * at_once;
    const unsigned within = item - first * row_tiles;
    const unsigned some = min(at_once, pairs - first);
    return {op, static_cast<int>(group), first + within % some, row_tiles - 1 - within / some,
            kPromptRows};
  }
};

// Places that no block has taken yet are handed out one by one; the last block to end makes both 0 again. So two
// launches must not overlap (kernels_cuda.h).
static __device__ unsigned places_taken, blocks_ended;

#if POISE_HAS_WGMMA

// Announces places to all warps, up to kAhead of them in advance: the first thread tells, every warp takes.
class PromptTurns {
  static constexpr unsigned kAhead = 4;

 public:
  struct Shared {
    std::uint64_t told[kAhead], taken[kAhead];
    AttentionPlace places[kAhead];
  };

  __device__ explicit PromptTurns(Shared* shared)
      : places_(shared->places),
        told_(shared_address(shared->told)),
        taken_(shared_address(shared->taken)) {}
  __device__ void begin() const {  // one thread; a barrier of all follows
    for (unsigned i = 0; i < kAhead; ++i) {
      begin_barrier(told_ + 8 * i, 1);
      begin_barrier(taken_ + 8 * i, kComputingWarps + kCopyingWarps);
    }
  }
  // One thread; a place without rows is the end.
  __device__ void tell(unsigned turn, const AttentionPlace& place) const {
    if (turn >= kAhead) {
      wait(taken_ + 8 * (turn % kAhead), (turn / kAhead - 1) & 1u);
    }
    places_[turn % kAhead] = place;
    arrive(told_ + 8 * (turn % kAhead));
  }
  __device__ AttentionPlace take(unsigned turn) const {  // all of a warp
    wait(told_ + 8 * (turn % kAhead), (turn / kAhead) & 1u);
    const AttentionPlace place = places_[turn % kAhead];
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      arrive(taken_ + 8 * (turn % kAhead));
    }
    return place;
  }

 private:
  AttentionPlace* const places_;
  const SharedAddress told_, taken_;
};

// The places that a block takes, one by one. Its first thread asks.
class PromptPlaces {
 public:
  __device__ PromptPlaces(const Attention& op, const PromptGrid& grid)
      : op_(op), grid_(grid), item_(blockIdx.x) {
    if (threadIdx.x == 0) {
      ask();
    }
  }
  // The next place that has work; behind the last one, a place with 0 rows.
  __device__ AttentionPlace next() {
    while (item_ < grid_.count()) {
      const AttentionPlace place = grid_.place(op_, item_);
      item_ = after_;
      ask();
      if (place.has_work()) {
        return place;
      }
    }
    AttentionPlace end = grid_.place(op_, 0);
    end.rows = 0;
    return end;
  }
  // Behind the end. All that this block asked for counts before another one may begin anew.
  __device__ void leave() const {
    __threadfence();
    if (atomicAdd(&blocks_ended, 1u) == gridDim.x - 1) {
      __threadfence();
      places_taken = 0;
      blocks_ended = 0;
    }
  }

 private:
  // The answer takes a while, and is not needed before the place after this one.
  __device__ void ask() { after_ = gridDim.x + atomicAdd(&places_taken, 1u); }

  const Attention& op_;
  const PromptGrid& grid_;
  unsigned item_, after_;
};

// What a warpgroup does with the tiles of a place.
template <typename T, int kDim>
class PromptGroup {
  using Rows = WarpRows<T, kDim, 1>;
  using Sizes = PromptSizes<kDim>;
  static constexpr int kScoreTiles = kTilePositions / 8;

 public:
  // `n`: the place's first tile, counted over all places of the block.
  __device__ PromptGroup(const Attention& op, const PromptRing<T, kDim>& ring,
                         const AttentionPlace& place, MergedInShared& merged, int group, unsigned n)
      : op_(op),
        ring_(ring),
        merged_(merged),
        group_(group),
        n_(n),
        rows_(op, place, first_row(), false) {}

  // A tile's values are added while the next one's scores become weights. Every tile of the place is taken: one that no
  // row of the group sees changes nothing. Returns the tile behind the place's last.
  __device__ unsigned attend(const AttentionPlace& place, unsigned turn) {
    TileWalk walk = walk_of(place);
    float scores[kScoreTiles][4];
    float shrink[2];
    take_queries(turn);
    ring_.need(n_);
    const SharedMatrix first = matrix(n_);
    wait_for_turn(group_);
    begin_scores(scores, first);
    give_turn(group_);
    wait_products<0>();
    hold(scores);
    ring_.leave_keys(n_);
    there_ = ring_.has(++n_);
    rows_.template weigh_scores<true>(walk.tile(), scores, shrink);
    rows_.use_weights(scores);
    for (;;) {
      const int slice = walk.slice();
      for (walk.step(); !walk.done() && walk.slice() == slice; walk.step()) {
        begin_both(scores);
        wait_products<1>();
        hold(scores);
        ring_.leave_keys(n_);
        const bool shrinks = rows_.template weigh_scores<true>(walk.tile(), scores, shrink);
        rows_.finish_weights();
        wait_products<0>();
        hold(rows_.sums());
        ring_.leave_values(n_ - 1);
        rows_.template shrink_sums<true>(shrinks, shrink);
        rows_.use_weights(scores);
        ++n_;
      }
      if (walk.done()) {
        const SharedMatrix last = matrix(n_ - 1);
        wait_for_turn(group_);
        begin_sums(last);
        give_turn(group_);
        wait_products<0>();
        hold(rows_.sums());
        ring_.leave_values(n_ - 1);
        rows_.end_slices(slice, merged_);
        return n_;
      }
      begin_both(scores);
      wait_products<1>();
      hold(scores);
      ring_.leave_keys(n_);
      const typename Rows::SliceState ended = rows_.begin_next();
      rows_.template weigh_scores<true>(walk.tile(), scores, shrink);
      rows_.finish_weights();
      wait_products<0>();
      hold(rows_.sums());
      ring_.leave_values(n_ - 1);
      Rows::free_shared();
      rows_.keep_slice(slice, ended, merged_);
      adds_ = false;
      rows_.use_weights(scores);
      ++n_;
    }
  }

  // Behind attend().
  __device__ void write_out() const {
    rows_.template write_out<MergedInShared::kPitch>(op_, merged_.of_warp());
  }

 private:
  // Of a tile's keys; its values are kEntryBytes behind.
  __device__ __forceinline__ SharedMatrix matrix(unsigned n) const {
    return {ring_.at(n), Sizes::kColumnsBytes};
  }

  __device__ int first_row() const {
    return group_ * kGroupRows + static_cast<int>(threadIdx.x) / kWarp % 4 * kWarpRows;
  }

  __device__ __forceinline__ void take_queries(unsigned turn) {
    const int row = static_cast<int>(threadIdx.x) % (4 * kWarp) / kWarp * kWarpRows +
                    static_cast<int>(threadIdx.x) % kWarpRows;
    const int half = static_cast<int>(threadIdx.x) % kWarp / kWarpRows;
    SharedAddress at =
        ring_.queries(turn, group_) + static_cast<unsigned>(row * 128 + (half ^ row) % 8 * 16);
    // Kept from place to place, the addresses below would lie in local memory, which takes longer.
    asm volatile("" : "+r"(at));
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      load_matrices(rows_.queries()[k], (at ^ static_cast<unsigned>(2 * k % 8 * 16)) +
                                            static_cast<unsigned>(k / 4 * Sizes::kColumnsBytes));
    }
    __syncwarp();
    ring_.leave_queries();
  }

  // The scores of tile n_.
  __device__ __forceinline__ void begin_scores(float (&scores)[kScoreTiles][4],
                                               const SharedMatrix& tile) {
    begin_products();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const int at = k / 4 * Sizes::kColumnsBytes + k % 4 * 32;
      if (k == 0) {
        multiply_together<T, false, false>(scores, rows_.queries()[k], tile.from(at));
      } else {
        multiply_together<T, false, true>(scores, rows_.queries()[k], tile.from(at));
      }
    }
    end_products();
  }
  // The sums of a tile whose scores have become weights. A slice's first tile replaces what was there.
  __device__ __forceinline__ void begin_sums(const SharedMatrix& tile) {
    hold(rows_.sums());
    begin_products();
#pragma unroll
    for (int k = 0; k < kTilePositions / 16; ++k) {
      multiply_together<T, true, true>(rows_.sums(), rows_.weights()[k],
                                       tile.from(Sizes::kEntryBytes + k * 2048), k > 0 || adds_);
    }
    adds_ = true;
    end_products();
  }
  // The scores of tile n_, and the sums of the tile before.
  __device__ __forceinline__ void begin_both(float (&scores)[kScoreTiles][4]) {
    ring_.need(n_, there_);
    const SharedMatrix before = matrix(n_ - 1);
    const SharedMatrix next = matrix(n_);
    wait_for_turn(group_);
    begin_scores(scores, next);
    begin_sums(before);
    give_turn(group_);
    there_ = ring_.has(n_ + 1);
  }

  const Attention& op_;
  const PromptRing<T, kDim>& ring_;
  MergedInShared& merged_;
  const int group_;
  unsigned n_;          // the tile that is next, counted over all places of the block
  bool adds_ = false;   // to sums of this slice's tiles before
  bool there_ = false;  // tile n_, when it was asked for
  Rows rows_;
};

#endif

// Without shared memory of its own where the code is not for 9.0a (see prompts_at_once).
template <typename T, int kDim>
__global__ void __launch_bounds__(kPromptThreads, 1)
    prompt_attention_kernel(const Attention op, const PromptGrid grid) {
#if POISE_HAS_WGMMA
  using Sizes = PromptSizes<kDim>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) std::uint64_t barriers[PromptRing<T, kDim>::kBarriers];
  __shared__ __align__(8) char told[sizeof(PromptTurns::Shared)];
  const PromptRing<T, kDim> ring(shared, barriers);
  const PromptTurns turns(reinterpret_cast<PromptTurns::Shared*>(told));
  if (threadIdx.x == 0) {
    ring.begin();
    turns.begin();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == 0) {
    keep_registers<56>();
    PromptPlaces places(op, grid);
    if (threadIdx.x == 0) {
      turns.tell(0, places.next());
    }
    unsigned n = 0;
    for (unsigned turn = 0;; ++turn) {
      const AttentionPlace place = turns.take(turn);
      if (same_in_warp(place.rows) == 0) {
        break;
      }
      if (threadIdx.x == 0) {
        turns.tell(turn + 1, places.next());
      }
      __syncwarp();
      ring.fill_queries(op, place, turn);
      n = ring.fill(op, place, n);
    }
    if (threadIdx.x == 0) {
      places.leave();
    }
  } else {
    take_registers<224>();
    char* merged = shared + Sizes::kSharedBytes - Sizes::kMergedBytes;
    MergedInShared before{reinterpret_cast<float4*>(merged) + (threadIdx.x - kGroupThreads)};
    if (group == 2) {
      give_turn(1);  // the first group begins
    }
    unsigned n = 0;
    for (unsigned turn = 0;; ++turn) {
      const AttentionPlace place = turns.take(turn);
      if (same_in_warp(place.rows) == 0) {
        break;
      }
      PromptGroup<T, kDim> rows(op, ring, place, before, group - 1, n);
      n = rows.attend(place, turn);
      rows.write_out();
    }
    wait_copies_out();
    if (group == 1) {
      wait_for_turn(0);  // which the second group gave last
    }
  }
#else
  __trap();
#endif
}

// How many blocks of the kernel run at once; none where it was not compiled for this GPU.
template <typename Kernel>
std::int64_t prompts_at_once(Kernel* kernel, std::size_t shared_bytes) {
  cudaFuncAttributes attributes{};
  cuda_check(cudaFuncGetAttributes(&attributes, kernel));
  if (attributes.sharedSizeBytes == 0) {
    return 0;
  }
  allow_shared("attend prompts", kernel, shared_bytes);
  int device = 0;
  int multiprocessors = 0;
  cuda_check(cudaGetDevice(&device));
  cuda_check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
  return multiprocessors;
}

// Pairs of a set, whose keys and values are in L2 (50 MiB on an H100, in two halves) at the same time. The last set is about
// as large as the others, and ends with its shortest places: with several places for each block, as far as L2 holds them,
// blocks end together (bench/results/2026-11-27-h100.md).
inline std::int64_t pairs_at_once(std::int64_t pairs, std::int64_t row_tiles,
                                  std::int64_t pair_bytes, std::int64_t blocks) {
  constexpr std::int64_t kUsual = 16 << 20;  // bytes of keys and values
  constexpr std::int64_t kMost = 32 << 20;
  constexpr std::int64_t kPlacesOfBlock = 4;
  const std::int64_t wanted =
      std::min(kMost / pair_bytes, ceil_div(kPlacesOfBlock * blocks, row_tiles));
  const std::int64_t sets =
      ceil_div(pairs, std::max({std::int64_t{1}, kUsual / pair_bytes, wanted}));
  return ceil_div(pairs, sets);
}

template <typename T, int kDim>
bool attend_prompts_with(const Attention& op, cudaStream_t stream) {
  using Sizes = PromptSizes<kDim>;
  static const std::int64_t at_once =
      prompts_at_once(&prompt_attention_kernel<T, kDim>, Sizes::kSharedBytes);
  if (at_once == 0) {
    return false;
  }
  const std::int64_t group = op.heads / op.kv_heads;
  const std::int64_t row_tiles = ceil_div(op.max_new_tokens * group, kPromptRows);
  const std::int64_t pairs = std::int64_t{op.kv_heads} * op.sequence_count;
  const std::int64_t pair_bytes = std::int64_t{4} * op.head_dim * std::max(op.max_context, 1);
  const PromptGrid grid{
      .pairs = static_cast<unsigned>(pairs),
      .at_once = static_cast<unsigned>(pairs_at_once(pairs, row_tiles, pair_bytes, at_once)),
      .row_tiles = static_cast<unsigned>(row_tiles),
      .group = static_cast<unsigned>(group)};
  const std::int64_t items = row_tiles * pairs;
  require(items <= 0x7fffffff, "a grid has less than 2^31 places");
  launch("attend prompts", &prompt_attention_kernel<T, kDim>,
         {.blocks = std::min(items, at_once),
          .threads = kPromptThreads,
          .shared_bytes = Sizes::kSharedBytes},
         stream, op, grid);
  return true;
}

// Whether it did: it serves more rows than attention_tiles.cuh takes at a time, of heads up to 128 wide, on
// GPUs that it was compiled for.
template <typename T>
bool attend_as_prompts(const Attention& op, cudaStream_t stream) {
  const std::int64_t rows = std::int64_t{op.max_new_tokens} * (op.heads / op.kv_heads);
  if (rows <= kTilePositions || op.head_dim <= 32 || op.head_dim > 128) {
    return false;
  }
  return op.head_dim <= 64 ? attend_prompts_with<T, 64>(op, stream)
                           : attend_prompts_with<T, 128>(op, stream);
}

}  // namespace poise::cuda
