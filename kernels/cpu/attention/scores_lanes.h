#pragma once
// Scores of queries and keys over sixteen lanes: lane i sums the products at i, i + 16, … in order, by fused
// multiply-adds, and the lanes are then added in halves, as Lanes::sum() does. In two ways that give the same bits: keys are read
// where they lie, for few queries; or they were transposed, for many. Included after gemm_lanes.h.

#include <cstdint>

#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

// The numbers of position i from 16 · part on: sixteen, or (kRest) the first `count`.
template <bool kRest, typename T>
inline Lanes load_part(Columns<T> keys, std::int64_t part, std::int64_t i, int count) {
  return kRest ? load_some(keys.at(part, i), count) : Lanes::load(keys.at(part, i));
}

// Keys whose sums stay in registers beside those of other rows.
constexpr int keys_together(int rows) {
  int keys = 8;
  while (keys > 1 && keys * rows > Lanes::kTileRows * Lanes::kTilePanels) {
    keys /= 2;
  }
  return keys;
}

// Partial sums of kRows queries and kKeys keys from the one at `first` on. A key beyond `last` is replaced by that one.
template <int kRows, int kKeys, bool kRest, typename Keys, typename Ahead>
inline void add_parts(Lanes (&sums)[kRows][16], const float* queries, std::int64_t stride,
                      const Keys& keys, int first, int last, std::int64_t dim, Ahead ahead) {
  Lanes sum[kRows][kKeys];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      sum[r][i] = Lanes::zero();
    }
  }
  for (std::int64_t p = 0; 16 * p < dim; ++p) {
    ahead(kKeys, p);
    const auto some = kRest && dim - 16 * p < 16 ? static_cast<int>(dim - 16 * p) : 16;
    Lanes key[kKeys];
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      key[i] = load_part<kRest>(keys, p, first + i < last ? first + i : last, some);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const float* const at = queries + r * stride + 16 * p;
      const Lanes query = kRest ? load_some(at, some) : Lanes::load(at);
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        sum[r][i] = Lanes::fma(query, key[i], sum[r][i]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      sums[r][first + i] = sum[r][i];
    }
  }
}

// scores[r, i] = queries[r] · keys[i] for `count` keys, 1 to 16; what comes after them is unspecified. Rows of
// queries lie `stride` apart. `ahead(keys, part)` is called for each part of so many keys. kRest: dim need
// not be a multiple of 16.
template <int kRows, bool kRest, typename Keys, typename Ahead>
inline void score_in_place(const float* queries, std::int64_t stride, const Keys& keys, int count,
                           std::int64_t dim, Sums scores, Ahead ahead) {
  constexpr int kKeys = keys_together(kRows);
  Lanes sums[kRows][16];
  const auto add = [&](int first) {
    add_parts<kRows, kKeys, kRest>(sums, queries, stride, keys, first, count - 1, dim, ahead);
  };
  if constexpr (kRows == 1) {  // all sums stay in registers
#pragma GCC unroll 16
    for (int first = 0; first < 16; first += kKeys) {
      add(first);
    }
  } else {
    for (int first = 0; first < 16; first += kKeys) {
      add(first);
    }
  }
  for (int r = 0; r < kRows; ++r) {
    Lanes::sums(sums[r]).store(scores.data + r * scores.stride);
  }
}

// Chains of a row that stay in registers together, and the rows beside each other then.
constexpr int kChains = Lanes::kTilePanels > 1 ? 4 : 1;  // 1 or 4
constexpr int kTileSums = Lanes::kTileRows * Lanes::kTilePanels;
constexpr int kScoredRows = kTileSums < kChains ? 1 : kTileSums / kChains;

// Chains in the order in which halves are added: each pair of neighbours, then each pair of those sums, …
constexpr int kOrder[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};

// The sums of a group of chains, for kRows queries and sixteen keys, and of the groups before it that wait for it.
// waiting[l]: those of 2ˡ groups.
template <int kRows>
inline void add_chains(Lanes (*waiting)[kRows], int group, const float* queries,
                       std::int64_t stride, const float* keys, std::int64_t dim) {
  Lanes sum[kRows][kChains];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) {
      sum[r][c] = Lanes::zero();
    }
  }
  const int* const order = &kOrder[group * kChains];
  const auto add = [&](int c, std::int64_t d) {
    const Lanes key = Lanes::load(keys + 16 * d);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sum[r][c] = Lanes::fma(Lanes::all(queries[d * stride + r]), key, sum[r][c]);
    }
  };
  std::int64_t d = 0;
  for (; d + 16 <= dim; d += 16) {
#pragma GCC unroll 16
    for (int c = 0; c < kChains; ++c) {
      add(c, d + order[c]);
    }
  }
#pragma GCC unroll 16
  for (int c = 0; c < kChains; ++c) {
    if (d + order[c] < dim) {
      add(c, d + order[c]);
    }
  }
  Lanes total[kRows];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    total[r] = sum[r][0];
    if constexpr (kChains == 4) {
      total[r] = (sum[r][0] + sum[r][1]) + (sum[r][2] + sum[r][3]);
    }
  }
  int level = 0;
  for (; (group >> level & 1) != 0; ++level) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      total[r] = waiting[level][r] + total[r];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
    waiting[level][r] = total[r];
  }
}

template <int kRows>
inline void score_rows(const float* queries, std::int64_t stride, const float* keys,
                       std::int64_t dim, Sums scores) {
  constexpr int kGroups = 16 / kChains, kLevels = kChains == 4 ? 3 : 5;
  Lanes waiting[kLevels][kRows];
  for (int group = 0; group < kGroups; ++group) {
    add_chains<kRows>(waiting, group, queries, stride, keys, dim);
  }
  for (int r = 0; r < kRows; ++r) {
    waiting[kLevels - 1][r].store(scores.data + r * scores.stride);
  }
}

// The same scores, for keys as (panels, dim, 16 positions) and queries as (dim, rows).
inline void score_panels(int rows, const float* queries, const float* keys, std::int64_t panels,
                         std::int64_t dim, Sums scores) {
  for (std::int64_t p = 0; p < panels; ++p) {
    for (int r = 0; r < rows; r += kScoredRows) {
      with_rows<kScoredRows>(rows - r < kScoredRows ? rows - r : kScoredRows, [&](auto some) {
        score_rows<some()>(queries + r, rows, keys + p * 16 * dim, dim,
                           Sums{scores.data + r * scores.stride + 16 * p, scores.stride});
      });
    }
  }
}

}  // namespace
}  // namespace poise::cpu
