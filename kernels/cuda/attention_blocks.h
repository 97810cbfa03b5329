#pragma once
// How attention on tensor cores cuts a context (attention_tiles.cuh says which bits follow), and how
// many thread blocks share one. Pure functions, on a GPU too.

#include <algorithm>
#include <cstdint>

#include "common/units.h"

#if defined(__CUDACC__)
#define POISE_ON_EVERY_DEVICE __host__ __device__
#else
#define POISE_ON_EVERY_DEVICE
#endif

namespace poise::cuda {

inline constexpr int kTilePositions = 64;  // and the most query rows of a block of threads
inline constexpr int kChunkTiles = 4;
inline constexpr int kChunkPositions = kChunkTiles * kTilePositions;
inline constexpr int kSlices = 8;

// The first position that the row at `position` attends.
POISE_ON_EVERY_DEVICE constexpr int first_seen(int position, int window) {
  return window == 0 || position < window ? 0 : position - window + 1;
}

// Slices that positions first .. last have a part in, one bit each: chunk c is of slice c % 8.
POISE_ON_EVERY_DEVICE constexpr unsigned slices_of(int first, int last) {
  const unsigned chunk = static_cast<unsigned>(first) / kChunkPositions;
  const unsigned count = static_cast<unsigned>(last) / kChunkPositions - chunk + 1;
  const unsigned bits = count >= kSlices ? (1u << kSlices) - 1 : (1u << count) - 1;
  const unsigned both = bits << chunk % kSlices;  // those beyond the last slice begin anew
  return (both | both >> kSlices) & ((1u << kSlices) - 1);
}

// The tiles of slices first, first + stride, …, slice by slice, of each slice its chunks in order. The
// context's tiles are first_tile .. tiles - 1.
class TileWalk {
 public:
  POISE_ON_EVERY_DEVICE TileWalk(int first, int stride, int first_tile, int tiles)
      : stride_(stride), first_tile_(first_tile), tiles_(tiles), slice_(first), tile_(tiles) {
    begin_slice();
  }

  POISE_ON_EVERY_DEVICE bool done() const { return tile_ >= tiles_; }
  POISE_ON_EVERY_DEVICE int slice() const { return slice_; }
  POISE_ON_EVERY_DEVICE int tile() const { return tile_; }  // behind the last one when done

  POISE_ON_EVERY_DEVICE void step() {
    ++tile_;
    if (tile_ % kChunkTiles == 0) {
      tile_ += (kSlices - 1) * kChunkTiles;
    }
    if (tile_ >= tiles_) {
      slice_ += stride_;
      begin_slice();
    }
  }

 private:
  // The first tile of slice_, or of the next one that has some.
  POISE_ON_EVERY_DEVICE void begin_slice() {
    const int chunk = first_tile_ / kChunkTiles;
    for (; slice_ < kSlices; slice_ += stride_) {
      const int ahead = (slice_ - chunk) & (kSlices - 1);
      tile_ = ahead == 0 ? first_tile_ : (chunk + ahead) * kChunkTiles;
      if (tile_ < tiles_) {
        return;
      }
    }
    tile_ = tiles_;
  }

  const int stride_, first_tile_, tiles_;
  int slice_, tile_;
};

// How many thread blocks should share a decoding row's context on a device that runs `places` blocks
// at once: the number with the earliest estimated end. If every place is taken, tiles pass at the
// memory's speed; if few are, at up to twice that, since one of two blocks draws a multiprocessor's
// whole share. A block that begins waits for about a tile's time. A row of fewer chunks than blocks
// leaves some blocks without work. Bits do not depend on this number.
inline int blocks_for_context(std::int64_t rows, std::int64_t context, std::int64_t places) {
  const std::int64_t chunks = std::max<std::int64_t>(1, ceil_div(context, kChunkPositions));
  int best = 1;
  double best_time = 0;
  for (int cluster = 1; cluster <= kSlices && cluster / 2 < chunks; cluster *= 2) {
    // Of the first block, which has no less to do than any other.
    const std::int64_t others = (chunks - 1) / kSlices * kSlices;  // chunks of full rounds
    const std::int64_t mine = others / cluster + ceil_div(chunks - others, cluster);
    const bool has_last = (chunks - 1 - others) % cluster == 0;
    const double tiles = static_cast<double>(mine * kChunkPositions -
                                             (has_last ? chunks * kChunkPositions - context : 0)) /
                         kTilePositions;
    const std::int64_t blocks = rows * std::min<std::int64_t>(cluster, chunks);  // with work
    const double rest = static_cast<double>(blocks % places) / static_cast<double>(places);
    const double time = static_cast<double>(blocks / places) * (tiles + 1) +
                        (rest > 0 ? std::max(rest, 0.5) * tiles + 1 : 0);
    if (cluster == 1 || time < best_time) {
      best = cluster;
      best_time = time;
    }
  }
  return best;
}

}  // namespace poise::cuda

#undef POISE_ON_EVERY_DEVICE
