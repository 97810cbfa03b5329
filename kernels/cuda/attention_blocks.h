#pragma once
// How attention on tensor cores cuts a context (attention_tiles.cuh says which bits follow), and how
// many thread blocks share one. Pure; host code calls it too.

#include <algorithm>
#include <cstdint>

#include "common/units.h"

namespace poise::cuda {

inline constexpr int kTilePositions = 64;  // and the most query rows of a block of threads
inline constexpr int kChunkTiles = 4;
inline constexpr int kChunkPositions = kChunkTiles * kTilePositions;
inline constexpr int kSlices = 8;

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
