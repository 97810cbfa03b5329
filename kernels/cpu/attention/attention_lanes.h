#pragma once
// Attention over sixteen lanes: how keys and values reach the rows of a slice
// (attention_rows_lanes.h), in two ways that give the same bits. With many rows the keys and values
// of a chunk are rearranged once for all tiles. With one tile per head, as in decoding, memory is
// the limit: several heads are computed together, so that memory is read in long runs; keys and values are read
// in place, or dequantised a block at a time.

#include <cstdint>

#include "common/units.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

template <typename Context>
class AttentionTask {
  using Number = typename Context::Number;

 public:
  explicit AttentionTask(const AttentionSlice& slice)
      : slice_(slice),
        op_(*slice.op),
        dim_(op_.head_dim),
        keys_(slice.scratch),
        values_(keys_ + kChunkTokens * kMaxHeadDim),
        context_(slice, values_ + kChunkTokens * kMaxHeadDim),
        rows_(slice, slice.scratch + kAttentionRowsBegin),
        ahead_(slice, context_.runs()) {}

  void run() {
    const bool narrow = takes_heads_together(op_, slice_.tokens * slice_.heads, Lanes::kTileRows);
    const Tiles tiles(rows_.rows_each());
    for (std::int32_t head = 0; head < slice_.kv_heads; ++head) {
      for (std::int64_t t = 0; t < tiles.count; ++t) {
        const auto first = head * rows_.rows_each() + static_cast<std::int32_t>(tiles.first(t));
        if (narrow) {
          rows_.copy_queries(first, tiles.size(t));
        } else {
          rows_.pack_queries(first, tiles.size(t));
        }
      }
    }
    // Blocks before the first row's window are not read.
    const std::int32_t seen_from = rows_.first_seen(0) / kBlockTokens * kBlockTokens;
    const std::int32_t end = rows_.last_limit();
    for (std::int32_t start = seen_from / kChunkTokens * kChunkTokens; start < end;
         start += kChunkTokens) {
      const std::int32_t begin = seen_from > start ? seen_from - start : 0;
      const std::int32_t count = end - start < kChunkTokens ? end - start : kChunkTokens;
      if (narrow) {
        with_rows(rows_.rows_each(),
                  [&](auto rows) { attend_together<rows()>(start, begin, count); });
      } else {
        attend_tiles(tiles, start, begin, count);
      }
    }
    rows_.write_out();
  }

 private:
  // Keys of positions [start, start + count) as (blocks, head_dim, 16 positions).
  void gather_keys(float* to, std::int32_t head, std::int32_t start, std::int32_t count) const {
    for (std::int32_t t = 0; t < count; t += kBlockTokens) {
      const int here = count - t < kBlockTokens ? count - t : kBlockTokens;
      const auto keys = context_.keys(head, (start + t) / kBlockTokens, here);
      transpose_16(to + t * dim_, keys.data, keys.step, here, dim_);
    }
  }
  // Values of positions start + [begin, count), of the slice's first head, as (head_dim / 16, positions,
  // 16) of float32. `begin` starts a block.
  void gather_values(std::int32_t start, std::int32_t begin, std::int32_t count) {
    for (std::int32_t t = begin; t < count; t += kBlockTokens) {
      const int here = count - t < kBlockTokens ? count - t : kBlockTokens;
      const auto values = context_.values(0, (start + t) / kBlockTokens, here);
      for (std::int32_t i = 0; i < here; ++i) {
        in_sixteens(dim_, [&](std::int64_t d, int some) {
          load_some(values.data + i * values.step + d, some)
              .store(values_ + d * kChunkTokens + 16 * (t + i));
        });
      }
    }
  }

  // Positions start + [begin, count), tile by tile.
  void attend_tiles(const Tiles& tiles, std::int32_t start, std::int32_t begin,
                    std::int32_t count) {
    gather_keys(keys_, 0, start + begin, count - begin);
    gather_values(start, begin, count);
    for (std::int64_t t = 0; t < tiles.count; ++t) {
      const auto first = static_cast<std::int32_t>(tiles.first(t));
      const std::int32_t most = rows_.visible(first + tiles.size(t) - 1, start, count);
      if (most > begin) {
        rows_.score(first, tiles.size(t), begin, most - begin, keys_);
        with_rows(tiles.size(t), [&](auto rows) {
          rows_.weigh(first, rows(), start, count);
          rows_.template add_values<rows()>(
              first, start, count, begin, count,
              Panels<float>{values_, 16 * kChunkTokens}.from(0, begin));
        });
      }
    }
  }

  // Positions start + [begin, count) for all heads of the slice: scores, weights, values.
  template <int kRows>
  void attend_together(std::int32_t start, std::int32_t begin, std::int32_t count) {
    pass_chunk(
        ahead_, start, begin, count, rows_.last_limit() - start - count,
        [&](std::int32_t t, std::int32_t end) { score_together<kRows>(start, t, end); },
        [&] { rows_.weigh(0, slice_.kv_heads * kRows, start, count); },
        [&](std::int32_t t, std::int32_t end) { add_together<kRows>(start, count, t, end); });
  }

  template <int kRows>
  void score_together(std::int32_t start, std::int32_t begin, std::int32_t end) {
    for (std::int32_t head = 0; head < slice_.kv_heads; ++head) {
      for (std::int32_t t = begin; t < end; t += kBlockTokens) {
        const int count = end - t < kBlockTokens ? end - t : kBlockTokens;
        rows_.template score_block<kRows>(
            head * kRows, t, count, context_.keys(head, (start + t) / kBlockTokens, count),
            PartsAhead<Number>{&ahead_});
      }
    }
  }
  template <int kRows>
  void add_together(std::int32_t start, std::int32_t count, std::int32_t begin, std::int32_t end) {
    for (std::int32_t head = 0; head < slice_.kv_heads; ++head) {
      for (std::int32_t t = begin; t < end; t += kBlockTokens) {
        const std::int32_t until = t + kBlockTokens < end ? t + kBlockTokens : end;
        const auto values = context_.values(head, (start + t) / kBlockTokens, until - t);
        rows_.template add_values<kRows>(head * kRows, start, count, t, until, values,
                                         LinesAhead<Number>{&ahead_});
      }
    }
  }

  const AttentionSlice& slice_;
  const Attention& op_;
  const std::int64_t dim_;
  float* const keys_;    // (blocks, head_dim, 16)
  float* const values_;  // (head_dim / 16, kChunkTokens, 16)
  const Context context_;
  AttentionRows rows_;
  Ahead ahead_;
};

inline void attention_slice(const AttentionSlice& slice) {
  with_type(slice.op->dtype, slice.op->slots[0], [&](const auto* typed) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(typed)>>;
    if (slice.op->format == KvFormat::plain) {
      AttentionTask<PlainContext<T>>(slice).run();
    } else {
      AttentionTask<QuantizedContext<T>>(slice).run();
    }
  });
}

}  // namespace
}  // namespace poise::cpu
