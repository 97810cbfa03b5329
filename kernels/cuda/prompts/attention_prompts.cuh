#pragma once
// Attention of prompts on GPUs of compute capability 9.0: up to 128 rows of one (sequence, key-value
// head) in a block of threads. One warpgroup copies keys and values into a ring in shared memory; two
// others compute, 64 rows each, with products that four warps make together (wgmma.cuh). They read a tile once
// for 64 rows, where each warp of attention_tiles.cuh reads it for its sixteen.
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
inline constexpr int kPromptRows = kComputingGroups * kGroupRows;
inline constexpr int kPromptThreads = (1 + kComputingGroups) * kGroupThreads;

template <int kDim>
struct PromptSizes {
  static_assert(kDim == 64 || kDim == 128);
  static constexpr int kVectors = kDim / 8;
  static constexpr int kColumnsBytes = kTilePositions * 128;  // 64 columns of a tile
  static constexpr int kEntryBytes = kDim / 64 * kColumnsBytes;
  static constexpr int kEntries = 8;
  static constexpr int kRingBytes = kEntries * kEntryBytes;
  static constexpr int kMergedBytes = kComputingGroups * kGroupThreads * kDim / 8 * 16;
  static constexpr int kSharedBytes =
      1024 + kRingBytes + kMergedBytes;  // the ring at a multiple of 1,024
  static constexpr int kAtOnce =
      kGroupThreads / kVectors;   // positions that the threads copy at once
  static constexpr int kLag = 3;  // copies under way when the next is begun
};

#if POISE_HAS_WGMMA

// Slices already merged, of one thread's two rows.
struct MergedInShared {
  float4* sums;
  float maximum[2], denominator[2];

  __device__ float4& sum(int n) { return sums[n * kComputingGroups * kGroupThreads]; }
};

template <typename T, int kDim>
class PromptRing {
  using Sizes = PromptSizes<kDim>;
  static constexpr int kVectorNumbers = 8;

 public:
  __device__ PromptRing(char* shared, std::uint64_t* full, std::uint64_t* empty)
      : shared_((shared_address(shared) + 1023u) & ~1023u),
        full_(shared_address(full)),
        empty_(shared_address(empty)) {}

  // One thread; a barrier of all follows.
  __device__ void begin() const {
    for (int entry = 0; entry < Sizes::kEntries; ++entry) {
      begin_barrier(full_ + 8u * static_cast<unsigned>(entry), kGroupThreads);
      begin_barrier(empty_ + 8u * static_cast<unsigned>(entry),
                    kComputingGroups * kGroupThreads / kWarp);
    }
  }

  // Entry n, the next in order, is there.
  __device__ SharedAddress next(unsigned n) const {
    wait(full_ + 8 * (n % Sizes::kEntries), (n / Sizes::kEntries) & 1u);
    return shared_ + n % Sizes::kEntries * Sizes::kEntryBytes;
  }
  // This warp needs entry n no longer.
  __device__ void leave(unsigned n) const {
    if (threadIdx.x % kWarp == 0) {
      arrive(empty_ + 8 * (n % Sizes::kEntries));
    }
  }

  // The place's entries in order, from entry n on, by the warpgroup that copies: each computing group's queries,
  // then the keys and the values of each tile. Returns the next entry.
  __device__ unsigned fill(const Attention& op, const AttentionPlace& place, unsigned n) const {
    const int row = static_cast<int>(threadIdx.x) / Sizes::kVectors;
    const int vector = static_cast<int>(threadIdx.x) % Sizes::kVectors;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const std::int64_t token_bytes = std::int64_t{2} * op.kv_heads * op.head_dim * sizeof(T);
    const std::int64_t head_bytes = std::int64_t{sizeof(T)} * place.kv_head * op.head_dim;
    const std::int64_t value_bytes = token_bytes / 2;
    const ContextBlock* blocks = op.blocks + place.sequence.first_block;
    // Where a block of the tile begins, for this head; a lane knows that of block lane % 4.
    const auto place_of = [&](int tile) -> const char* {
      const int block = tile * kTileBlocks + lane % kTileBlocks;
      if (block * kBlockTokens >= place.end || (block + 1) * kBlockTokens <= place.begin) {
        return static_cast<const char*>(op.slots[0]);  // never read
      }
      const ContextBlock at = blocks[block];
      const void* slots = at.buffer == 0 ? op.slots[0] : at.buffer == 1 ? op.slots[1] : op.slots[2];
      return static_cast<const char*>(slots) + at.slot * (kBlockTokens * token_bytes) + head_bytes;
    };
    const unsigned seen =
        vector < op.head_dim / 8 ? static_cast<unsigned>(place.end - place.begin) : 0u;
    const std::int64_t offset = row * token_bytes + 16 * vector;
    const SharedAddress to = shared_ + static_cast<unsigned>(vector / 8 * Sizes::kColumnsBytes +
                                                             row * 128 + (vector ^ row) % 8 * 16);
    unsigned told = n;  // the first entry that nobody knows to be there
    // Entry n: `copy` brings rows at, at + kAtOnce, … to `to` + 128 · at.
    const auto bring = [&](const auto& copy) {
      const unsigned entry = n % Sizes::kEntries;
      if (n >= Sizes::kEntries) {
        wait(empty_ + 8 * entry, (n / Sizes::kEntries - 1) & 1u);
      }
#pragma unroll
      for (int at = 0; at < kTilePositions; at += Sizes::kAtOnce) {
        copy(at, to + entry * Sizes::kEntryBytes + static_cast<unsigned>(at * 128));
      }
      end_copy_group();
      ++n;
      if (n - told > Sizes::kLag) {
        wait_copy_groups<Sizes::kLag>();
        show_to_products();
        arrive(full_ + 8 * (told++ % Sizes::kEntries));
      }
    };
#pragma unroll 1
    for (int first = row; first < kPromptRows; first += kGroupRows) {
      bring([&](int at, SharedAddress into) {
        const int of = first + at;
        copy_16_async(
            into, static_cast<const T*>(op.q) + place.offset_of(op, of) + kVectorNumbers * vector,
            of < place.rows && vector < op.head_dim / kVectorNumbers);
      });
    }
    TileWalk walk = place.walk();
    const char* later = place_of(walk.tile());
    while (!walk.done()) {
      const int skip = place.begin - walk.tile() * kTilePositions - row;
      const auto mine = reinterpret_cast<unsigned long long>(later);
      walk.step();
      if (!walk.done()) {
        later = place_of(walk.tile());
      }
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {
        const std::int64_t from = offset + (which == 0 ? 0 : value_bytes);
        bring([&](int at, SharedAddress into) {
          const auto block =
              reinterpret_cast<const char*>(__shfl_sync(kAllLanes, mine, at / kBlockTokens));
          copy_16_async(into, block + from + at % kBlockTokens * token_bytes,
                        static_cast<unsigned>(at - skip) < seen);
        });
      }
    }
    wait_copy_groups<0>();
    show_to_products();
    for (; told < n; ++told) {
      arrive(full_ + 8 * (told % Sizes::kEntries));
    }
    return n;
  }

 private:
  const SharedAddress shared_, full_, empty_;
};

// What a warpgroup does with the ring's entries.
template <typename T, int kDim>
class PromptGroup {
  using Rows = WarpRows<T, kDim, 1>;
  static constexpr int kScoreTiles = kTilePositions / 8;

 public:
  __device__ PromptGroup(const Attention& op, const AttentionPlace& place, int group)
      : rows_(op, place, group * kGroupRows + static_cast<int>(threadIdx.x) / kWarp % 4 * kWarpRows,
              false),
        group_(group) {}

  __device__ __forceinline__ void begin_scores(float (&scores)[kScoreTiles][4],
                                               SharedAddress keys) {
    const SharedMatrix matrix(keys, 16);
    begin_products();
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const int at = k / 4 * PromptSizes<kDim>::kColumnsBytes + k % 4 * 32;
      if (k == 0) {
        multiply_together<T, false, false>(scores, rows_.queries()[k], matrix.from(at));
      } else {
        multiply_together<T, false, true>(scores, rows_.queries()[k], matrix.from(at));
      }
    }
    end_products();
  }
  __device__ __forceinline__ void begin_sums(SharedAddress values) {
    const SharedMatrix matrix(values, PromptSizes<kDim>::kColumnsBytes);
    hold(rows_.sums());
    begin_products();
#pragma unroll
    for (int k = 0; k < kTilePositions / 16; ++k) {
      multiply_together<T, true, true>(rows_.sums(), rows_.weights()[k], matrix.from(k * 2048));
    }
    end_products();
  }

  // The queries, from the first of the place's entries.
  __device__ __forceinline__ void take_queries(const PromptRing<T, kDim>& ring, unsigned n) {
    const int row = static_cast<int>(threadIdx.x) % (4 * kWarp) / kWarp * kWarpRows +
                    static_cast<int>(threadIdx.x) % kWarpRows;
    const int half = static_cast<int>(threadIdx.x) % kWarp / kWarpRows;
    const SharedAddress entries[kComputingGroups] = {ring.next(n), ring.next(n + 1)};
    const SharedAddress at =
        (group_ == 0 ? entries[0] : entries[1]) + static_cast<unsigned>(row * 128);
#pragma unroll
    for (int k = 0; k < kDim / 16; ++k) {
      const int vector = 2 * k + half;
      load_matrices(rows_.queries()[k],
                    at + static_cast<unsigned>(vector / 8 * PromptSizes<kDim>::kColumnsBytes +
                                               (vector ^ row) % 8 * 16));
    }
    __syncwarp();
    ring.leave(n);
    ring.leave(n + 1);
  }

  // A tile's values are added while the next one's scores become weights. Every tile of the block is taken:
  // one that no row of the group sees changes nothing.
  __device__ unsigned attend(const AttentionPlace& place, const PromptRing<T, kDim>& ring,
                             MergedInShared merged, unsigned n) {
    TileWalk walk = place.walk();
    float scores[kScoreTiles][4];
    float shrink[2];
    begin_scores(scores, ring.next(n));
    wait_products<0>();
    hold(scores);
    ring.leave(n);
    rows_.template weigh_scores<true>(walk.tile(), scores, shrink);
    rows_.use_weights(scores, shrink);
    for (++n;;) {  // the next entry, values
      const int slice = walk.slice();
      for (walk.step(); !walk.done() && walk.slice() == slice; walk.step()) {
        begin_scores(scores, ring.next(n + 1));
        begin_sums(ring.next(n));
        wait_products<1>();
        hold(scores);
        ring.leave(n + 1);
        rows_.template weigh_scores<true>(walk.tile(), scores, shrink);
        wait_products<0>();
        hold(rows_.sums());
        ring.leave(n);
        rows_.use_weights(scores, shrink);
        n += 2;
      }
      if (walk.done()) {
        begin_sums(ring.next(n));
        wait_products<0>();
        hold(rows_.sums());
        ring.leave(n);
        rows_.end_slice(slice, merged);
        return n + 1;
      }
      begin_scores(scores, ring.next(n + 1));
      begin_sums(ring.next(n));
      wait_products<0>();
      hold(scores);
      hold(rows_.sums());
      ring.leave(n);
      ring.leave(n + 1);
      rows_.end_slice(slice, merged);
      rows_.template weigh_scores<true>(walk.tile(), scores, shrink);
      rows_.use_weights(scores, shrink);
      n += 2;
    }
  }

  __device__ void write_out(const Attention& op) const { rows_.write_out(op); }

 private:
  Rows rows_;
  const int group_;
};

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

// Which place the computing warpgroups go to next: the copying one tells them, one ahead.
class PromptTurns {
 public:
  static constexpr unsigned kNone = ~0u;

  __device__ PromptTurns(unsigned* items, std::uint64_t* told, std::uint64_t* taken)
      : items_(items), told_(shared_address(told)), taken_(shared_address(taken)) {}
  __device__ void begin() const {  // one thread; a barrier of all follows
    for (unsigned i = 0; i < 2; ++i) {
      begin_barrier(told_ + 8 * i, 1);
      begin_barrier(taken_ + 8 * i, kComputingGroups * kGroupThreads / kWarp);
    }
  }
  __device__ void tell(unsigned turn, unsigned item) const {  // one thread
    if (turn >= 2) {
      wait(taken_ + 8 * (turn % 2), (turn / 2 - 1) & 1u);
    }
    items_[turn % 2] = item;
    arrive(told_ + 8 * (turn % 2));
  }
  __device__ unsigned take(unsigned turn) const {  // all of a warp
    wait(told_ + 8 * (turn % 2), (turn / 2) & 1u);
    const unsigned item = *const_cast<volatile unsigned*>(&items_[turn % 2]);
    __syncwarp();
    if (threadIdx.x % kWarp == 0) {
      arrive(taken_ + 8 * (turn % 2));
    }
    return item;
  }

 private:
  unsigned* const items_;
  const SharedAddress told_, taken_;
};

#endif

// Without shared memory of its own where the code is not for 9.0a (see prompts_at_once).
template <typename T, int kDim>
__global__ void __launch_bounds__(kPromptThreads, 1)
    prompt_attention_kernel(const Attention op, const PromptGrid grid) {
#if POISE_HAS_WGMMA
  using Sizes = PromptSizes<kDim>;
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) std::uint64_t full[Sizes::kEntries], empty[Sizes::kEntries];
  __shared__ __align__(8) std::uint64_t told[2], taken[2];
  __shared__ unsigned items[2], next;
  const PromptRing<T, kDim> ring(shared, full, empty);
  const PromptTurns turns(items, told, taken);
  if (threadIdx.x == 0) {
    ring.begin();
    turns.begin();
  }
  __syncthreads();
  const int group = static_cast<int>(threadIdx.x) / kGroupThreads;
  if (group == 0) {
    keep_registers<40>();
    unsigned n = 0, turn = 0, ahead = 0;
    for (unsigned item = blockIdx.x; item < grid.count();) {
      if (threadIdx.x == 0) {
        ahead = gridDim.x + atomicAdd(&places_taken, 1u);
      }
      const AttentionPlace place = grid.place(op, item);
      if (place.has_work()) {
        if (threadIdx.x == 0) {
          turns.tell(turn, item);
        }
        ++turn;
        n = ring.fill(op, place, n);
      }
      if (threadIdx.x == 0) {
        next = ahead;
      }
      asm volatile("bar.sync 1, 128;\n" ::: "memory");
      item = *const_cast<volatile unsigned*>(&next);
      asm volatile("bar.sync 1, 128;\n" ::: "memory");
    }
    if (threadIdx.x == 0) {
      turns.tell(turn, PromptTurns::kNone);
      if (atomicAdd(&blocks_ended, 1u) == gridDim.x - 1) {
        places_taken = 0;
        blocks_ended = 0;
      }
    }
  } else {
    take_registers<232>();
    char* merged = shared + Sizes::kSharedBytes - Sizes::kMergedBytes;
    MergedInShared before{reinterpret_cast<float4*>(merged) + (threadIdx.x - kGroupThreads)};
    unsigned n = 0;
    for (unsigned turn = 0;; ++turn) {
      const unsigned item = turns.take(turn);
      if (item == PromptTurns::kNone) {
        break;
      }
      const AttentionPlace place = grid.place(op, item);
      PromptGroup<T, kDim> rows(op, place, group - 1);
      rows.take_queries(ring, n);
      n += kComputingGroups;
      n = rows.attend(place, ring, before, n);
      rows.write_out(op);
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

template <typename T, int kDim>
bool attend_prompts_with(const Attention& op, cudaStream_t stream) {
  using Sizes = PromptSizes<kDim>;
  static const std::int64_t at_once =
      prompts_at_once(&prompt_attention_kernel<T, kDim>, Sizes::kSharedBytes);
  if (at_once == 0) {
    return false;
  }
  constexpr std::int64_t kCached = 8 << 20;  // bytes of keys and values
  const std::int64_t group = op.heads / op.kv_heads;
  const std::int64_t row_tiles = ceil_div(op.max_new_tokens * group, kPromptRows);
  const std::int64_t pairs = std::int64_t{op.kv_heads} * op.sequence_count;
  const std::int64_t pair_bytes = std::int64_t{4} * op.head_dim * std::max(op.max_context, 1);
  const PromptGrid grid{
      .pairs = static_cast<unsigned>(pairs),
      .at_once = static_cast<unsigned>(std::clamp<std::int64_t>(kCached / pair_bytes, 1, pairs)),
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
