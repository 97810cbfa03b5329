#pragma once
// Attention of few rows over quantised context, from the codes themselves. A group with scale s and offset o
// gives
//   q · k = s (q · codes) + o Σ q,   Σ pₜ vₜ = Σ (pₜ sₜ) codesₜ + Σ pₜ oₜ,
// so a code becomes a float32 and is multiplied at once: memory is the limit again, not arithmetic. What the codes
// stand for is not rounded to its type, which attention_slice does. So these are not that one's bits, but they are nearer to
// what float64 makes of the codes, and the same for every instruction set, slice and number of workers. Included after context_lanes.h.
//
// Sums that differ from attention_rows_lanes.h: a score is made of sixteen chains for each group, of which each is multiplied
// with the scale and added to the group's before; the chains are then added in halves, and Σ q times the offset, group by group.
// Chain i takes the numbers i and 16 + i of each 32 (int8), or 2i and 2i + 1 (int4). Values take up weight · scale times code, a
// position after the other; their offsets are summed in sixteen lanes of positions over a chunk, which are then added in halves,
// and to the output. A position that a row does not see has weight 0: codes are finite, scales and offsets are not used then.

#include <cstdint>

#include "common/formats/kv_format.h"
#include "common/units.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

constexpr int kPair = 32;  // numbers that are read together: two parts of sixteen
constexpr int kMostRows = Lanes::kTileRows < 4 ? Lanes::kTileRows : 4;  // share what was read
constexpr int kMaxKvGroups = static_cast<int>(kMaxHeadDim / kKvGroup);  // of a head

// 32 codes. int8: two parts in order. int4: of sixteen bytes the low halves and the high ones, which are the even and
// the odd numbers, each less 8. to_parts puts the numbers of a row in that order.
template <KvFormat kFormat>
inline void load_pair(const std::uint8_t* codes, Lanes& first, Lanes& second) {
  if constexpr (kFormat == KvFormat::int8) {
    first = Lanes::of_bytes(codes);
    second = Lanes::of_bytes(codes + 16);
  } else {
    first = Lanes::low_int4s(codes);
    second = Lanes::high_int4s(codes);
  }
}
template <KvFormat kFormat>
inline void to_parts(float* row, std::int64_t dim) {
  if constexpr (kFormat == KvFormat::int4) {
    for (float* x = row; x < row + dim; x += kPair) {
      float odd[16];
      for (int i = 0; i < 16; ++i) {
        odd[i] = x[2 * i + 1];
        x[i] = x[2 * i];
      }
      Lanes::load(odd).store(x + 16);
    }
  }
}
template <KvFormat kFormat>
inline void from_parts(float* row, std::int64_t dim) {
  if constexpr (kFormat == KvFormat::int4) {
    for (float* x = row; x < row + dim; x += kPair) {
      float numbers[kPair];
      for (int i = 0; i < 16; ++i) {
        numbers[2 * i] = x[i];
        numbers[2 * i + 1] = x[16 + i];
      }
      Lanes::load(numbers).store(x);
      Lanes::load(numbers + 16).store(x + 16);
    }
  }
}
// Bytes of 32 codes.
template <KvFormat kFormat>
constexpr int kPairBytes = kFormat == KvFormat::int8 ? 32 : 16;

// Prefetches as many lines for a pair of one position as its share of all that a slice reads of a position.
struct PairsAhead {
  Ahead* ahead;
  std::int64_t sixteenths;  // of a line

  // For pair `pair` of `positions` positions. Shifts: what is shifted is not negative.
  __attribute__((always_inline)) void operator()(std::int64_t pair, int positions) const {
    const std::int64_t each = positions * sixteenths;
    ahead->prefetch(((pair + 1) * each >> 4) - (pair * each >> 4));
  }
};

// A head's codes of a block's positions.
struct CodeRows {
  const std::uint8_t* data;
  std::int64_t step;  // bytes from one position to the next
};

// Scales and offsets of sixteen positions: of one group each, one beside the other.
struct GroupLanes {
  float scales[16], offsets[16];
};

// Sums of kRows queries and kKeys keys from the one at `first` on: Σ scale (q · codes).
template <int kRows, int kKeys, KvFormat kFormat>
inline void add_code_keys(Lanes (&sums)[kRows][16], const float* queries, const CodeRows& keys,
                          int first, int last, std::int64_t dim, const GroupLanes* groups,
                          PairsAhead ahead) {
  const std::uint8_t* key[kKeys];
#pragma GCC unroll 16
  for (int i = 0; i < kKeys; ++i) {
    key[i] = keys.data + keys.step * (first + i < last ? first + i : last);
  }
  std::int64_t pairs = first / kKeys * (dim / kPair);
  for (std::int64_t begin = 0; begin < dim; begin += kKvGroup, ++groups) {
    const std::int64_t end = dim - begin < kKvGroup ? dim : begin + kKvGroup;
    Lanes sum[kRows][kKeys];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        sum[r][i] = Lanes::zero();
      }
    }
    for (std::int64_t d = begin; d < end; d += kPair, ++pairs) {
      ahead(pairs, kKeys);
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        Lanes low, high;
        load_pair<kFormat>(key[i], low, high);
        key[i] += kPairBytes<kFormat>;
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          sum[r][i] = Lanes::fma(Lanes::load(queries + r * dim + d), low, sum[r][i]);
          sum[r][i] = Lanes::fma(Lanes::load(queries + r * dim + d + 16), high, sum[r][i]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) {
        const Lanes before = begin == 0 ? Lanes::zero() : sums[r][first + i];
        sums[r][first + i] = Lanes::fma(sum[r][i], Lanes::all(groups->scales[first + i]), before);
      }
    }
  }
}

// scores[r, i] = queries[r] · keys[i] for `count` keys, 1 to 16; what comes after them is unspecified.
// query_sums: (kRows, kMaxKvGroups), of each group of a query.
template <int kRows, KvFormat kFormat>
inline void score_codes(const float* queries, const float* query_sums, const CodeRows& keys,
                        int count, std::int64_t dim, const GroupLanes* groups, Sums scores,
                        PairsAhead ahead) {
  constexpr int kKeys = keys_together(kRows);
  Lanes sums[kRows][16];
  for (int first = 0; first < 16; first += kKeys) {
    add_code_keys<kRows, kKeys, kFormat>(sums, queries, keys, first, count - 1, dim, groups,
                                         ahead);
  }
  for (int r = 0; r < kRows; ++r) {
    Lanes score = Lanes::sums(sums[r]);
    for (int g = 0; g * kKvGroup < dim; ++g) {
      score = Lanes::fma(Lanes::all(query_sums[r * kMaxKvGroups + g]),
                         Lanes::load(groups[g].offsets), score);
    }
    score.store(scores.data + r * scores.stride);
  }
}

// sums[r] += Σ weight[r, t] · codes[t] over the numbers of kPairs pairs, which are of one group.
template <int kRows, int kPairs, KvFormat kFormat>
inline void add_code_tile(const float (*weights)[16], std::int64_t weights_step,
                          const CodeRows& values, int count, Sums sums, PairsAhead ahead) {
  Lanes sum[kRows][2 * kPairs];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < 2 * kPairs; ++p) {
      sum[r][p] = Lanes::load(sums.data + r * sums.stride + 16 * p);
    }
  }
  const std::uint8_t* at = values.data;
  for (int t = 0; t < count; ++t, at += values.step) {
    ahead(t, kPairs);
    Lanes codes[2 * kPairs];
#pragma GCC unroll 16
    for (int p = 0; p < kPairs; ++p) {
      load_pair<kFormat>(at + p * kPairBytes<kFormat>, codes[2 * p], codes[2 * p + 1]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Lanes weight = Lanes::all(weights[r * weights_step][t]);
#pragma GCC unroll 16
      for (int p = 0; p < 2 * kPairs; ++p) {
        sum[r][p] = Lanes::fma(weight, codes[p], sum[r][p]);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int p = 0; p < 2 * kPairs; ++p) {
      sum[r][p].store(sums.data + r * sums.stride + 16 * p);
    }
  }
}

// sums[r] += Σ_t weights[r, group][t] · codes[t], for `count` positions. weights: (kRows, kMaxKvGroups, 16).
template <int kRows, KvFormat kFormat>
inline void add_codes(const float (*weights)[16], CodeRows values, int count, std::int64_t dim,
                      Sums sums, PairsAhead ahead) {
  for (std::int64_t d = 0; d < dim; d += kKvGroup, ++weights) {
    if (dim - d >= kKvGroup) {
      constexpr int kPairs = 4 * kRows <= Lanes::kTileRows * Lanes::kTilePanels ? 2 : 1;
      for (int p = 0; p < 2; p += kPairs) {
        add_code_tile<kRows, kPairs, kFormat>(weights, kMaxKvGroups, values, count, sums, ahead);
        values.data += kPairs * kPairBytes<kFormat>;
        sums.data += kPairs * kPair;
      }
    } else {
      add_code_tile<kRows, 1, kFormat>(weights, kMaxKvGroups, values, count, sums, ahead);
    }
  }
}

// A slice for which takes_codes. T: what the codes stand for.
template <typename T, KvFormat kFormat>
class CodesTask {
 public:
  explicit CodesTask(const AttentionSlice& slice)
      : slice_(slice),
        op_(*slice.op),
        dim_(op_.head_dim),
        context_(slice, nullptr),
        groups_(reinterpret_cast<GroupLanes*>(slice.scratch)),
        pairs_(reinterpret_cast<std::uint32_t*>(groups_ + kQueryRows * kMaxKvGroups)),
        offsets_(slice.scratch + kQueryRows * kMaxKvGroups * (32 + 16)),
        query_sums_(offsets_ + kQueryRows * kMaxKvGroups * 16),
        rows_(slice, slice.scratch + kAttentionRowsBegin),
        ahead_(slice, context_.runs()),
        pairs_ahead_{&ahead_, sixteenths_of_a_pair()} {
    static_assert(kQueryRows * kMaxKvGroups * (32 + 16 + 16 + 1) <= kAttentionRowsBegin);
  }

  void run() {
    rows_.copy_queries(0, slice_.kv_heads * rows_.rows_each());
    for (std::int32_t r = 0; r < slice_.kv_heads * rows_.rows_each(); ++r) {
      sum_query(r);
      to_parts<kFormat>(rows_.copied_query(r), dim_);
    }
    const std::int32_t seen_from = rows_.first_seen(0) / kBlockTokens * kBlockTokens;
    const std::int32_t end = rows_.last_limit();
    for (std::int32_t start = seen_from / kChunkTokens * kChunkTokens; start < end;
         start += kChunkTokens) {
      const std::int32_t begin = seen_from > start ? seen_from - start : 0;
      const std::int32_t count = end - start < kChunkTokens ? end - start : kChunkTokens;
      attend(start, begin, count);
    }
    for (std::int32_t r = 0; r < slice_.kv_heads * rows_.rows_each(); ++r) {
      from_parts<kFormat>(rows_.sum_row(r), dim_);
    }
    rows_.write_out();
  }

 private:
  // A run of memory begins and ends within lines.
  std::int64_t sixteenths_of_a_pair() const {
    const RowRuns runs = context_.runs();
    const std::int64_t lines = ceil_div(runs.length[0], 64) + ceil_div(runs.length[1], 64) + 1;
    const std::int64_t tiles = ceil_div(rows_.rows_each(), kMostRows);
    return ceil_div(16 * lines * kPair, slice_.kv_heads * dim_ * tiles);
  }

  void sum_query(std::int32_t r) {
    const float* const query = rows_.copied_query(r);
    for (std::int64_t d = 0, g = 0; d < dim_; d += kKvGroup, ++g) {
      Lanes sum = Lanes::zero();
      for (std::int64_t i = d; i < dim_ && i < d + kKvGroup; i += 16) {
        sum = sum + Lanes::load(query + i);
      }
      query_sums_[r * kMaxKvGroups + g] = sum.sum();
    }
  }

  // Groups of a block's keys (0) or values (1): of all heads of the slice.
  void read_groups(int which, std::int32_t block, int count) {
    const std::int32_t groups = slice_.kv_heads * context_.layout().groups;
    static_assert(sizeof(KvGroup<T>) == sizeof(std::uint32_t));
    transpose_16(pairs_, reinterpret_cast<const std::uint32_t*>(context_.groups(which, block)),
                 context_.layout().row / 4, count, groups);
    for (std::int32_t g = 0; g < groups; ++g) {
      Lanes scale, offset;
      Lanes::load_pairs(pairs_ + 16 * g, static_cast<const T*>(nullptr), scale, offset);
      if constexpr (kFormat == KvFormat::int4) {
        offset = Lanes::fma(Lanes::all(8.0f), scale, offset);
      }
      scale.store(groups_[g].scales);
      offset.store(groups_[g].offsets);
    }
  }

  // Positions start + [begin, count) for all heads of the slice: scores, weights, values.
  void attend(std::int32_t start, std::int32_t begin, std::int32_t count) {
    const auto each_block = [](std::int32_t t, std::int32_t end, auto work) {
      for (; t < end; t += kBlockTokens) {
        work(t, end - t < kBlockTokens ? end - t : kBlockTokens);
      }
    };
    pass_chunk(
        ahead_, start, begin, count, rows_.last_limit() - start - count,
        [&](std::int32_t first, std::int32_t end) {
          each_block(first, end, [&](std::int32_t t, int some) { score_block(start, t, some); });
        },
        [&] {
          rows_.weigh(0, slice_.kv_heads * rows_.rows_each(), start, count);
          forget_offsets();
        },
        [&](std::int32_t first, std::int32_t end) {
          each_block(first, end,
                     [&](std::int32_t t, int some) { add_block(start, count, t, some); });
        });
    add_offsets();
  }

  // fn(first row, its number as a constant, head): rows of each head, a few at a time.
  template <typename Fn>
  void for_rows(Fn fn) const {
    const int each = rows_.rows_each();
    for (std::int32_t head = 0; head < slice_.kv_heads; ++head) {
      for (int r = 0; r < each; r += kMostRows) {
        with_rows<kMostRows>(each - r < kMostRows ? each - r : kMostRows,
                             [&](auto rows) { fn(head * each + r, rows, head); });
      }
    }
  }

  void score_block(std::int32_t start, std::int32_t begin, int count) {
    const std::int32_t block = (start + begin) / kBlockTokens;
    read_groups(0, block, count);
    for_rows([&](std::int32_t first, auto rows, std::int32_t head) {
      score_codes<rows(), kFormat>(
          rows_.copied_query(first), query_sums_ + first * kMaxKvGroups,
          CodeRows{context_.codes(0, head, block), context_.layout().row}, count, dim_,
          groups_ + head * context_.layout().groups,
          Sums{rows_.score_row(first) + begin, kChunkTokens}, pairs_ahead_);
    });
  }

  // Of a chunk of `all` positions, the block's at `begin`.
  void add_block(std::int32_t start, std::int32_t all, std::int32_t begin, int count) {
    const std::int32_t block = (start + begin) / kBlockTokens;
    read_groups(1, block, count);
    for_rows([&](std::int32_t first, auto rows, std::int32_t head) {
      float weights[rows() * kMaxKvGroups][16];
      for (int r = 0; r < rows(); ++r) {
        weigh_codes(weights + r * kMaxKvGroups, first + r, start, all, begin,
                    groups_ + head * context_.layout().groups);
      }
      add_codes<rows(), kFormat>(
          weights, CodeRows{context_.codes(1, head, block), context_.layout().row}, count, dim_,
          Sums{rows_.sum_row(first), dim_}, pairs_ahead_);
    });
  }

  // weights[g][t] = weight · scale, and weight · offset is added to offsets_; 0 where row r does not see the position, whose
  // numbers may be anything.
  void weigh_codes(float (*weights)[16], std::int32_t r, std::int32_t start, std::int32_t all,
                   std::int32_t begin, const GroupLanes* groups) {
    const Lanes none = Lanes::zero();
    const int seen = rows_.visible(r, start, all) - begin;
    const int unseen = rows_.hidden(r, start, all) - begin;
    const auto shown = [&](Lanes x) {
      const Lanes until = seen < 16 ? Lanes::first(seen > 0 ? seen : 0, x, none) : x;
      return unseen > 0 ? Lanes::first(unseen, none, until) : until;
    };
    const Lanes weight = Lanes::load(rows_.score_row(r) + begin);
    for (std::int32_t g = 0; g < context_.layout().groups; ++g) {
      shown(weight * Lanes::load(groups[g].scales)).store(weights[g]);
      float* const kept = offsets_ + (r * kMaxKvGroups + g) * 16;
      (Lanes::load(kept) + shown(weight * Lanes::load(groups[g].offsets))).store(kept);
    }
  }

  void forget_offsets() {
    for (std::int32_t i = 0; i < slice_.kv_heads * rows_.rows_each() * kMaxKvGroups; ++i) {
      Lanes::zero().store(offsets_ + 16 * i);
    }
  }
  void add_offsets() {
    for (std::int32_t r = 0; r < slice_.kv_heads * rows_.rows_each(); ++r) {
      for (std::int64_t d = 0; d < dim_; d += 16) {
        const float* const kept = offsets_ + (r * kMaxKvGroups + d / kKvGroup) * 16;
        const Lanes offset = Lanes::all(Lanes::load(kept).sum());
        (Lanes::load(rows_.sum_row(r) + d) + offset).store(rows_.sum_row(r) + d);
      }
    }
  }

  const AttentionSlice& slice_;
  const Attention& op_;
  const std::int64_t dim_;
  const QuantizedContext<T> context_;
  GroupLanes* const groups_;  // (kv_heads, groups), of a block's keys or values
  std::uint32_t* const pairs_;  // the same as it lies there: (kv_heads, groups, 16), a scale and an offset each
  float* const offsets_;      // (rows, kMaxKvGroups, 16): what offsets add to the chunk's sums
  float* const query_sums_;   // (rows, kMaxKvGroups)
  AttentionRows rows_;
  Ahead ahead_;
  const PairsAhead pairs_ahead_;
};

template <typename T>
inline void codes_task(const AttentionSlice& slice) {
  if (slice.op->format == KvFormat::int8) {
    CodesTask<T, KvFormat::int8>(slice).run();
  } else {
    CodesTask<T, KvFormat::int4>(slice).run();
  }
}

// attention_slice from codes where that is possible. Of a type of 16 bits.
inline void codes_slice(const AttentionSlice& slice) {
  if (!takes_codes(*slice.op)) {
    attention_slice(slice);
  } else if (slice.op->dtype == DType::float16) {
    codes_task<Half>(slice);
  } else {
    codes_task<BFloat16>(slice);
  }
}

}  // namespace
}  // namespace poise::cpu
