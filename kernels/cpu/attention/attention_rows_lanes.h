#pragma once
// The softmax over the rows of an AttentionSlice, with sixteen lanes: queries packed for tiles,
// scores of one chunk, and what is carried from chunk to chunk. Included after
// gemm_lanes.h.
//
// The order of every sum depends on positions only. Context is taken in chunks of kChunkTokens,
// cut at multiples of it. Within a chunk a score is sixteen chains of fused multiply-adds over head_dim, added in
// halves (scores_lanes.h), times scale; the row's maximum grows to the chunk's; lane i of the denominator sums the
// weights at positions i, i + 16, … and the lanes are then added in halves; the output takes up its
// chain, one fused multiply-add a position, in order. Before a later chunk both are scaled by
// exp(old maximum - new maximum). Positions a row may not see are never multiplied, not even by 0.

#include <cstdint>
#include <cstring>

#include "common/units.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

class AttentionRows {
 public:
  explicit AttentionRows(const AttentionSlice& slice, float* scratch)
      : slice_(slice),
        op_(*slice.op),
        rows_each_(slice.tokens * slice.heads),
        rows_(slice.kv_heads * rows_each_),
        dim_(op_.head_dim),
        dim_panels_((op_.head_dim + 15) / 16),
        queries_(scratch),
        sums_(queries_ + kQueryRows * kMaxHeadDim),
        scores_(sums_ + kQueryRows * kMaxHeadDim),
        maxima_(scores_ + kQueryRows * kChunkTokens),
        denominators_(maxima_ + kQueryRows) {
    for (std::int64_t i = 0; i < rows_ * 16 * dim_panels_; ++i) {
      sums_[i] = 0.0f;
    }
    for (std::int32_t r = 0; r < rows_; ++r) {
      maxima_[r] = -__builtin_inff();
      denominators_[r] = 0.0f;
    }
  }

  // Rows of one key-value head; those of the slice's next one follow.
  std::int32_t rows_each() const { return rows_each_; }
  // How many positions row r attends.
  std::int32_t limit(std::int32_t r) const {
    return slice_.sequence->context + slice_.first_token + r % rows_each_ / slice_.heads + 1;
  }
  std::int32_t last_limit() const { return limit(rows_each_ - 1); }
  // The first position row r attends.
  std::int32_t first_seen(std::int32_t r) const {
    const std::int32_t first = op_.window == 0 ? 0 : limit(r) - op_.window;
    return first < 0 ? 0 : first;
  }
  // Row r sees the chunk's positions [hidden, visible); none where they are equal.
  std::int32_t visible(std::int32_t r, std::int32_t start, std::int32_t count) const {
    const std::int32_t seen = limit(r) - start;
    return seen < 0 ? 0 : seen < count ? seen : count;
  }
  std::int32_t hidden(std::int32_t r, std::int32_t start, std::int32_t count) const {
    const std::int32_t before = first_seen(r) - start;
    const std::int32_t end = visible(r, start, count);
    return before < 0 ? 0 : before < end ? before : end;
  }

  // Of row r: its scores of the chunk, then its weights; its sums so far; what copy_queries copied.
  float* score_row(std::int32_t r) { return scores_ + r * std::int64_t{kChunkTokens}; }
  float* sum_row(std::int32_t r) { return sums_ + r * 16 * dim_panels_; }
  float* copied_query(std::int32_t r) { return queries_ + r * dim_; }

  // Queries of rows [first, first + rows) for score_block: as they are, (rows, head_dim).
  void copy_queries(std::int32_t first, int rows) {
    for (std::int32_t r = first; r < first + rows; ++r) {
      std::memcpy(queries_ + r * dim_, queries() + row_offset(r),
                  static_cast<std::size_t>(dim_) * sizeof(float));
    }
  }
  // … for score: (head_dim, rows).
  void pack_queries(std::int32_t first, int rows) {
    float* packed = queries_ + first * dim_;
    if (slice_.heads == 1 && rows >= 4) {
      pack_tile(packed, queries() + row_offset(first), op_.heads * dim_, rows, dim_);
      return;
    }
    for (int i = 0; i < rows; ++i) {
      const float* q = queries() + row_offset(first + i);
      for (std::int64_t d = 0; d < dim_; ++d) {
        packed[d * rows + i] = q[d];
      }
    }
  }

  // Scores of positions [begin, begin + count) of the chunk; keys: (blocks, head_dim, 16).
  void score(std::int32_t first, int rows, std::int32_t begin, std::int32_t count,
             const float* keys) {
    score_panels(rows, queries_ + first * dim_, keys, (count + 15) / 16, dim_,
                 Sums{score_row(first) + begin, kChunkTokens});
  }
  // Of a block's positions, whose keys are read in place; its first one is `begin` of the chunk.
  template <int kRows, typename Keys, typename Ahead>
  void score_block(std::int32_t first, std::int32_t begin, int count, const Keys& keys,
                   Ahead ahead) {
    score_in_place<kRows, false>(queries_ + first * dim_, dim_, keys, count, dim_,
                                 Sums{score_row(first) + begin, kChunkTokens}, ahead);
  }

  // Scores of the chunk to weights; maximum, denominator and sums of each row follow.
  void weigh(std::int32_t first, int rows, std::int32_t start, std::int32_t count) {
    for (std::int32_t r = first; r < first + rows; ++r) {
      const std::int32_t seen = visible(r, start, count);
      const std::int32_t unseen = hidden(r, start, count);
      if (seen > unseen) {
        weigh_row(r, unseen, seen, start > 0);
      }
    }
  }

  // Adds positions [begin, end) of the chunk to the sums: what only the earlier rows see (windows),
  // what all rows see together, then what only the later ones do. `values` starts at `begin`.
  // `ahead` is prefetched meanwhile.
  template <int kRows, typename Values, typename Ahead = NothingAhead>
  void add_values(std::int32_t first, std::int32_t start, std::int32_t count, std::int32_t begin,
                  std::int32_t end, Values values, Ahead ahead = {}) {
    const auto seen = [&](std::int32_t r) {
      const std::int32_t until = visible(r, start, count);
      return until < begin ? begin : until < end ? until : end;
    };
    const auto unseen = [&](std::int32_t r) {
      const std::int32_t before = hidden(r, start, count);
      return before < begin ? begin : before < end ? before : end;
    };
    const auto add_row = [&](std::int32_t r, std::int32_t from, std::int32_t until) {
      if (until > from) {
        add_values_of_row(r, from, until, values.from(0, from - begin));
      }
    };
    const std::int32_t common = seen(first);
    const std::int32_t common_from = op_.window == 0 ? begin : unseen(first + kRows - 1);
    if (common_from > common) {  // the rows' windows have nothing in common
      for (std::int32_t r = first; r < first + kRows; ++r) {
        add_row(r, unseen(r), seen(r));
      }
      return;
    }
    if (common_from > begin) {
      for (std::int32_t r = first; r < first + kRows; ++r) {
        add_row(r, unseen(r), common_from);
      }
    }
    if (common > common_from) {
      multiply_panels<kRows, tile_panels(kRows)>(
          Inputs<1, kChunkTokens>{score_row(first) + common_from},
          values.from(0, common_from - begin), dim_panels_, common - common_from,
          Sums{sum_row(first), 16 * dim_panels_}, true, ahead);
    }
    for (std::int32_t r = first + 1; r < first + kRows; ++r) {
      add_row(r, common, seen(r));
    }
  }

  void write_out() {
    for (std::int32_t r = 0; r < rows_; ++r) {
      const Lanes denominator = Lanes::all(denominators_[r]);
      float* out = static_cast<float*>(op_.out) + row_offset(r);
      in_sixteens(dim_, [&](std::int64_t d, int some) {
        store_some(Lanes::load(sum_row(r) + d) / denominator, out + d, some);
      });
    }
  }

 private:
  // Not inlined: there are few such rows, and many copies of the caller.
  template <typename Values>
  __attribute__((noinline)) void add_values_of_row(std::int32_t r, std::int32_t from,
                                                   std::int32_t until, Values values) {
    multiply_panels<1, tile_panels(1)>(Inputs<1, kChunkTokens>{score_row(r) + from}, values,
                                       dim_panels_, until - from,
                                       Sums{sum_row(r), 16 * dim_panels_}, true);
  }

  // Of a row's query in q, and of its output in out.
  const float* queries() const { return static_cast<const float*>(op_.q); }
  std::int64_t row_offset(std::int32_t r) const {
    const std::int32_t kv_head = slice_.kv_head + r / rows_each_;
    const std::int32_t within = r % rows_each_;
    const std::int64_t token =
        slice_.sequence->first_row + slice_.first_token + within / slice_.heads;
    const std::int64_t head =
        kv_head * (op_.heads / op_.kv_heads) + slice_.first_head + within % slice_.heads;
    return (token * op_.heads + head) * dim_;
  }
  // `unseen` positions lie before the row's window: they weigh nothing, and sums leave them out.
  void weigh_row(std::int32_t r, std::int32_t unseen, std::int32_t seen, bool later_chunk) {
    float* scores = score_row(r);
    const Lanes scale = Lanes::all(op_.scale);
    const std::int32_t begin = unseen / 16 * 16;
    const auto within = [&](std::int32_t t, Lanes yes, Lanes no) {
      const Lanes until = Lanes::first(seen - t, yes, no);
      return unseen > t ? Lanes::first(unseen - t, no, until) : until;
    };
    Lanes largest = Lanes::all(maxima_[r]);
    for (std::int32_t t = begin; t < seen; t += 16) {
      const Lanes score = Lanes::load(scores + t) * scale;
      score.store(scores + t);
      largest = Lanes::max(within(t, score, largest), largest);
    }
    const float maximum = largest.largest();
    if (later_chunk && maximum > maxima_[r]) {
      const Lanes shrink = exp(Lanes::all(maxima_[r] - maximum));
      for (std::int64_t d = 0; d < 16 * dim_panels_; d += 16) {
        (Lanes::load(sum_row(r) + d) * shrink).store(sum_row(r) + d);
      }
      float factor[16];
      shrink.store(factor);
      denominators_[r] *= factor[0];
    }
    maxima_[r] = maximum;
    Lanes total = Lanes::zero();
    for (std::int32_t t = begin; t < seen; t += 16) {
      const Lanes weight = exp(Lanes::load(scores + t) - Lanes::all(maximum));
      weight.store(scores + t);
      total = total + within(t, weight, Lanes::zero());
    }
    denominators_[r] += total.sum();
  }

  const AttentionSlice& slice_;
  const Attention& op_;
  const std::int32_t rows_each_, rows_;
  const std::int64_t dim_, dim_panels_;
  float* const queries_;       // tile by tile, as copied or packed
  float* const sums_;          // (rows, 16 · dim_panels)
  float* const scores_;        // (rows, kChunkTokens)
  float* const maxima_;        // (rows)
  float* const denominators_;  // (rows)
};

}  // namespace
}  // namespace poise::cpu
