#pragma once
// Attention of 16-bit queries, keys and values on tensor cores, one design for a prompt and for a
// decoding row. A row is a (token, query head) pair; a block of four warps takes up to 64 rows of one
// (sequence, key-value head), so that the query heads of a group share a pass over its keys and values.
// Context passes through shared memory in tiles of 64 positions cut at multiples of 64, keys and values
// as separate entries of a ring (attention_context.cuh). Of more than sixteen rows each warp takes
// sixteen; up to sixteen, a decoding token of a group for one, the four share tile by tile: one alone
// would take longer for a tile than memory does. Where such rows are few or their contexts long, a
// cluster of blocks takes one (sequence, key-value head), each block some slices of the context; the
// results of each row meet in the shared memory of one of them (distributed shared memory; compute
// capability 9.0).
//
// Bits of a row: context is cut into chunks of 256 positions at multiples of 256, and every eighth chunk
// makes a slice: chunk c is of slice c % 8. In a slice, tile by tile in order: scores are tensor core
// products over head_dim, sixteen at a time in order; weights are 2^((score - maximum)·scale·log2 e),
// rounded to the stored type for their product with the values, sixteen positions at a time in order.
// The maximum is the largest score of the first tile of which the row sees a position; a later tile's
// takes its place only where a weight would exceed 2^8, so sums seldom have to shrink. The denominator
// is summed in float32, each lane its own columns, the four lanes at the slice's end. Then slices are
// merged in order, the first taken as it is: both sides
// scaled to the larger maximum, in float32. A slice that a row sees nothing of, or a tile, does not exist
// for it. All of it follows from positions alone: a row's place among the sixteen, what the tile's other
// rows see, how many warps or blocks took part changes nothing. What a row may not see has weight 0 (its
// own maximum is kept), and keys and values outside of what the block's rows see, before their windows
// or behind their last position, are zeros, never the slot's old bytes.

#include <algorithm>
#include <bit>
#include <cstdint>

#include "common/units.h"
#include "kernels/cuda/attention_blocks.h"
#include "kernels/cuda/attention_context.cuh"
#include "kernels/cuda/attention_rows.cuh"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"

namespace poise::cuda {

// More than sixteen rows, sixteen to a warp; with few some warps only copy.
template <typename T, int kDim, bool kCodes>
__device__ void attend_apart(const Attention& op, const AttentionPlace& place,
                             ContextRing<T, kDim, kCodes>& ring) {
  using Rows = WarpRows<T, kDim, 1>;
  Rows rows(op, place);
  typename Rows::Merged merged;
  TileWalk walk = place.walk();
  for (int i = 0; !walk.done(); ++i) {
    const int tile = walk.tile();
    const int slice = walk.slice();
    walk.step();
    const char* later = ring.look_up();
    const bool see = rows.see(tile);
    const SharedAddress keys = ring.next(2 * i);
    if (see) {
      rows.weigh(tile, keys);
    }
    const SharedAddress values = ring.next(2 * i + 1);
    if (see) {
      rows.add_values(values);
    }
    ring.keep(i, later);
    if (walk.done() || walk.slice() != slice) {
      rows.end_slice(slice, merged);
    }
  }
  rows.write_out(op);
}

// Up to sixteen rows, which the four warps share. In a cluster of several blocks this one leaves its
// slices' results to those that merge them; `results` are what others leave to it.
template <typename T, int kDim, bool kCodes>
__device__ void attend_together(const Attention& op, const AttentionPlace& place,
                                unsigned cluster_bits, ContextRing<T, kDim, kCodes>& ring,
                                float* scores, SliceResults<kDim>* results) {
  using Rows = WarpRows<T, kDim, kAttentionWarps>;
  Rows rows(op, place);
  typename Rows::Merged merged;
  const bool alone = cluster_bits == 0;
  if (!alone) {
    cluster_wait();  // all have begun
  }
  TileWalk walk = place.walk();
  for (int i = 0; !walk.done(); ++i) {
    const int tile = walk.tile();
    const int slice = walk.slice();
    walk.step();
    const char* later = ring.look_up();
    rows.score(scores, ring.next(2 * i));
    const SharedAddress values = ring.next(2 * i + 1);  // all have scored
    rows.weigh(tile, scores);
    rows.add_values(values);
    ring.keep(i, later);
    if (walk.done() || walk.slice() != slice) {
      if (alone) {
        rows.end_slice(slice, merged);
      } else {
        rows.end_slice(slice, results, cluster_bits);
      }
    }
  }
  if (alone) {
    rows.write_out(op);
  }
}

template <typename T, int kDim, bool kCodes>
__global__ void __launch_bounds__(kAttentionThreads, 2)
    attention_kernel(const Attention op, const AttentionGrid grid) {
  extern __shared__ __align__(16) char shared[];
  __shared__ const char* table[kTableTiles][kTileBlocks];
  __shared__ __align__(16) float scores[kWarpRows * kScorePitch];
  // Of several blocks a cluster alone.
  auto* results = reinterpret_cast<SliceResults<kDim>*>(shared + TileSizes<kDim>::kSharedBytes);
  const AttentionPlace place(op, grid);
  // No block waits for one that has nothing to do and nothing to merge.
  if (!place.has_work() && !place.merges()) {
    return;
  }
  if (place.cluster > 1) {
    cluster_begins();
  }
  if (place.has_work()) {
    ContextRing<T, kDim, kCodes> ring(op, grid, place, shared, table);
    ring.begin();
    if (place.rows > kWarpRows) {
      attend_apart(op, place, ring);
    } else {
      attend_together(op, place, grid.cluster_bits, ring, scores, results);
    }
    wait_copy_groups<0>();
  } else {
    cluster_wait();
  }
  if (place.cluster > 1) {
    cluster_arrive();
    cluster_wait();
    if (place.merges()) {
      merge_slices<T>(op, place, results);
    }
  }
}

// How many blocks of the kernel the device runs at once, and whether in clusters.
struct AttentionDevice {
  std::int64_t places;
  bool clusters;

  // `cluster_bytes`: of shared memory beyond `shared_bytes`, at most, that blocks of a cluster use.
  template <typename Kernel>
  AttentionDevice(Kernel* kernel, std::size_t shared_bytes, std::size_t cluster_bytes) {
    int device = 0;
    int multiprocessors = 0;
    int blocks = 0;
    cudaFuncAttributes attributes{};
    cuda_check(cudaFuncGetAttributes(&attributes, kernel));
    // Code made for an older GPU has no clusters on a newer one either.
    clusters = attributes.ptxVersion >= 90;
    allow_shared("attend", kernel, shared_bytes + (clusters ? cluster_bytes : 0));
    cuda_check(cudaGetDevice(&device));
    cuda_check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, kAttentionThreads,
                                                             shared_bytes));
    places = std::int64_t{multiprocessors} * std::max(blocks, 1);
  }
};

template <typename T, int kDim, bool kCodes>
void attend(const Attention& op, cudaStream_t stream) {
  using Sizes = TileSizes<kDim>;
  constexpr std::size_t kShared = Sizes::kSharedBytes;
  constexpr std::size_t kResults = sizeof(SliceResults<kDim>);
  // One device a process: once is enough.
  static const AttentionDevice device(&attention_kernel<T, kDim, kCodes>, kShared,
                                      kResults * Sizes::kResultRows);
  const std::int64_t group = op.heads / op.kv_heads;
  const std::int64_t rows = op.max_new_tokens * group;  // of a sequence and key-value head
  const std::int64_t row_tiles = ceil_div(rows, kTilePositions);
  const std::int64_t blocks = row_tiles * op.kv_heads * op.sequence_count;
  // A window's positions have parts in one chunk more than as many from a chunk's begin.
  const std::int64_t context =
      op.window > 0
          ? std::min<std::int64_t>(op.max_context, std::int64_t{op.window} + op.max_new_tokens - 1 +
                                                       kChunkPositions - 1)
          : op.max_context;
  std::int64_t cluster =
      device.clusters && rows <= kWarpRows ? blocks_for_context(blocks, context, device.places) : 1;
  while (cluster > 1 && ceil_div(rows, cluster) > Sizes::kResultRows) {
    cluster *= 2;
  }
  const AttentionGrid grid{
      .row_tiles = static_cast<unsigned>(row_tiles),
      .cluster_bits = static_cast<unsigned>(std::countr_zero(static_cast<unsigned>(cluster))),
      .group = static_cast<unsigned>(group),
      .layout = kv_row_layout(op.kv_heads, op.head_dim, op.dtype, op.format)};
  const std::size_t results =
      cluster > 1 ? kResults * static_cast<std::size_t>(ceil_div(rows, cluster)) : 0;
  launch("attend", &attention_kernel<T, kDim, kCodes>,
         {.blocks = blocks * cluster,
          .threads = kAttentionThreads,
          .shared_bytes = kShared + results,
          .cluster = static_cast<int>(cluster)},
         stream, op, grid);
}

// The narrowest instance that holds a head; kCodes: of quantised blocks. REQUIRES: head_dim a multiple
// of 8, at most 256.
template <typename T, bool kCodes>
void attend_with_tiles(const Attention& op, cudaStream_t stream) {
  if (op.head_dim <= 32) {
    attend<T, 32, kCodes>(op, stream);
  } else if (op.head_dim <= 64) {
    attend<T, 64, kCodes>(op, stream);
  } else if (op.head_dim <= 80) {
    attend<T, 80, kCodes>(op, stream);
  } else if (op.head_dim <= 96) {
    attend<T, 96, kCodes>(op, stream);
  } else if (op.head_dim <= 128) {
    attend<T, 128, kCodes>(op, stream);
  } else if (op.head_dim <= 160) {
    attend<T, 160, kCodes>(op, stream);
  } else if (op.head_dim <= 192) {
    attend<T, 192, kCodes>(op, stream);
  } else {
    attend<T, 256, kCodes>(op, stream);
  }
}

}  // namespace poise::cuda
