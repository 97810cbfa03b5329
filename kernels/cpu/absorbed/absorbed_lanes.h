#pragma once
// AbsorbedAttention over sixteen lanes, in three parts: queries that absorb W_K, attention of one row of a
// sequence for some of its heads, and values from sums of activations. Included after attention_lanes.h.
//
// The order of every sum depends on positions and on which of them are absorbed. A row's chunks, maxima and
// denominators are attention's (attention_rows_lanes.h), and so are the scores and values of keys that are there.
// An absorbed query is one chain of fused multiply-adds over head_dim, q · b_K sums lane i over elements i,
// i + 16, …; an absorbed score is one chain over hidden_size, plus q · b_K, times scale. The weighted sum of
// activations takes up its chain, one fused multiply-add a position, in order; the weights of absorbed positions
// are added block by block, each in halves. A value is one chain over hidden_size of W_V and that sum, both
// divided by the denominator before, then one fused multiply-add of b_V, then the sum over values that are there.

#include <cstdint>

#include "common/units.h"
#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

inline constexpr std::uint8_t kAbsorbedBlock = 3;  // ContextBlock::buffer

// Where the parts of an AbsorbedAttention lie.
struct AbsorbedShape {
  explicit AbsorbedShape(const AbsorbedAttention& one)
      : op(one),
        dim(one.attention.head_dim),
        hidden(one.w_kv.cols),
        padded((one.w_kv.cols + 15) / 16 * 16),
        group(one.attention.heads / one.attention.kv_heads),
        row(absorbed_row_floats(one.w_kv.cols, one.attention.head_dim, one.attention.max_context)) {
  }

  const float* query(std::int64_t sequence, std::int64_t head) const {
    return static_cast<const float*>(op.attention.q) + row_of(sequence, head) * dim;
  }
  float* out(std::int64_t sequence, std::int64_t head) const {
    return static_cast<float*>(op.attention.out) + row_of(sequence, head) * dim;
  }
  // (padded) an absorbed query, then a sum of activations; behind it one number: q · b_K, then the weight
  // of all absorbed positions.
  float* absorbed(std::int64_t sequence, std::int64_t head) const {
    return op.scratch + (sequence * op.attention.heads + head) * row;
  }
  // Some inputs of the panels that hold rows [row, …) of [W_K W_V].
  template <typename T>
  Panels<T> panels(std::int64_t row, std::int64_t input) const {
    return {static_cast<const T*>(op.w_kv.data) + (row / 16 * hidden + input) * 16, hidden * 16};
  }

  const AbsorbedAttention& op;
  const std::int64_t dim, hidden, padded, group;
  const std::int64_t row;  // floats of the scratch for a row's query head

 private:
  std::int64_t row_of(std::int64_t sequence, std::int64_t head) const {
    return std::int64_t{op.attention.sequences[sequence].first_row} * op.attention.heads + head;
  }
};

// Calls fn(first, rows) for tiles of the (sequence, head) pairs of a slice's key-value head.
template <typename Fn>
inline void for_tiles(const AbsorbedSlice& slice, std::int64_t group, Fn fn) {
  const Tiles tiles(slice.sequences * group);
  for (std::int64_t t = 0; t < tiles.count; ++t) {
    fn(tiles.first(t), tiles.size(t));
  }
}

// Columns [first, first + 16) of one head's W_K, as (head_dim, 16).
template <typename T>
inline void gather_columns(const AbsorbedShape& shape, std::int64_t kv_head, std::int64_t first,
                           float* to) {
  alignas(64) float square[16 * 16];
  const std::int64_t row = kv_head * shape.dim;
  const int width = shape.hidden - first < 16 ? static_cast<int>(shape.hidden - first) : 16;
  for (std::int64_t n = row; n < row + shape.dim;) {
    transpose_16(square, shape.panels<T>(n, first).data, 16, width, 16);
    const std::int64_t end =
        n / 16 * 16 + 16 < row + shape.dim ? n / 16 * 16 + 16 : row + shape.dim;
    for (; n < end; ++n) {
      Lanes::load(square + 16 * (n % 16)).store(to + (n - row) * 16);
    }
  }
}

inline float bias_of_keys(const AbsorbedShape& shape, const float* query, std::int64_t kv_head) {
  Lanes sum = Lanes::zero();
  if (shape.op.b_kv != nullptr) {
    in_sixteens(shape.dim, [&](std::int64_t d, int some) {
      const Lanes bias =
          load_parameter(shape.op.b_kv, shape.op.w_kv.dtype, kv_head * shape.dim + d, some);
      sum = Lanes::fma(load_some(query + d, some), bias, sum);
    });
  }
  return sum.sum();
}

// Columns of the absorbed queries of one key-value head; with the first ones, q · b_K.
template <typename T>
inline void absorb_columns(const AbsorbedSlice& slice) {
  const AbsorbedShape shape(*slice.op);
  const std::int64_t panels = (slice.columns + 15) / 16;
  float* const weights = slice.scratch;                      // (panels, head_dim, 16)
  float* const queries = weights + panels * 16 * shape.dim;  // (head_dim, rows)
  float* const sums = queries + Lanes::kTileRows * shape.dim;
  for (std::int64_t p = 0; p < panels; ++p) {
    gather_columns<T>(shape, slice.kv_head, slice.first_column + 16 * p,
                      weights + p * 16 * shape.dim);
  }
  for_tiles(slice, shape.group, [&](std::int64_t first, int rows) {
    const auto sequence = [&](int i) { return (first + i) / shape.group; };
    const auto head = [&](int i) {
      return slice.kv_head * shape.group + (first + i) % shape.group;
    };
    for (int i = 0; i < rows; ++i) {
      const float* q = shape.query(sequence(i), head(i));
      for (std::int64_t d = 0; d < shape.dim; ++d) {
        queries[d * rows + i] = q[d];
      }
      if (slice.first_column == 0) {
        shape.absorbed(sequence(i), head(i))[shape.padded] = bias_of_keys(shape, q, slice.kv_head);
      }
    }
    with_rows(rows, [&](auto constant) {
      constexpr int kRows = decltype(constant)::value;
      multiply_panels<kRows, tile_panels(kRows)>(Inputs<kRows, 1>{queries},
                                                 Panels<float>{weights, 16 * shape.dim}, panels,
                                                 shape.dim, Sums{sums, 16 * panels}, false);
    });
    for (int i = 0; i < rows; ++i) {
      float* to = shape.absorbed(sequence(i), head(i)) + slice.first_column;
      for (std::int64_t c = 0; c < 16 * panels; c += 16) {
        Lanes::load(sums + 16 * panels * i + c).store(to + c);
      }
    }
  });
}

// The values of one key-value head, added to what attention of the other positions left in `out`.
template <typename T>
inline void add_absorbed_values(const AbsorbedSlice& slice) {
  const AbsorbedShape shape(*slice.op);
  const Attention& op = slice.op->attention;
  const std::int64_t row = (std::int64_t{op.kv_heads} + slice.kv_head) * shape.dim;
  const std::int64_t panels = (row % 16 + shape.dim + 15) / 16;
  float* const inputs = slice.scratch;  // (hidden_size, rows)
  float* const sums = inputs + Lanes::kTileRows * shape.hidden;
  for_tiles(slice, shape.group, [&](std::int64_t first, int rows) {
    const auto sequence = [&](int i) { return (first + i) / shape.group; };
    const auto head = [&](int i) {
      return slice.kv_head * shape.group + (first + i) % shape.group;
    };
    for (int i = 0; i < rows; ++i) {
      const float* from = shape.absorbed(sequence(i), head(i));
      for (std::int64_t c = 0; c < shape.hidden; ++c) {
        inputs[c * rows + i] = from[c];
      }
    }
    with_rows(rows, [&](auto constant) {
      constexpr int kRows = decltype(constant)::value;
      multiply_panels<kRows, tile_panels(kRows)>(Inputs<kRows, 1>{inputs}, shape.panels<T>(row, 0),
                                                 panels, shape.hidden, Sums{sums, 16 * panels},
                                                 false);
    });
    for (int i = 0; i < rows; ++i) {
      float* out = shape.out(sequence(i), head(i));
      const Lanes weight = Lanes::all(shape.absorbed(sequence(i), head(i))[shape.padded]);
      const float* sum = sums + 16 * panels * i + row % 16;
      in_sixteens(shape.dim, [&](std::int64_t d, int some) {
        Lanes value = load_some(sum + d, some);
        if (slice.op->b_kv != nullptr) {
          const Lanes bias = load_parameter(slice.op->b_kv, slice.op->w_kv.dtype, row + d, some);
          value = Lanes::fma(weight, bias, value);
        }
        store_some(load_some(out + d, some) + value, out + d, some);
      });
    }
  });
}

// Where a sequence's blocks lie in the ACT buffer.
template <typename T>
struct AbsorbedBlocks {
  const AbsorbedAttention& op;
  const AttentionSequence& sequence;

  const ContextBlock& at(std::int32_t position) const {
    return op.attention.blocks[sequence.first_block + position / kBlockTokens];
  }
  bool absorbs(std::int32_t position) const { return at(position).buffer == kAbsorbedBlock; }
  // The activations of a block's positions, rows of hidden_size.
  const T* activations(std::int32_t position) const {
    return static_cast<const T*>(op.act) +
           std::int64_t{at(position).slot} * kBlockTokens * op.w_kv.cols;
  }
};

// The softmax of one sequence's row in some of its heads, and what it weighs.
class AbsorbedRows {
 public:
  AbsorbedRows(const AbsorbedSlice& slice, const AbsorbedShape& shape, float* scratch)
      : slice_(slice),
        shape_(shape),
        dim_padded_((shape.dim + 15) / 16 * 16),
        activations_(scratch),
        values_(activations_ + slice.heads * shape.padded),
        scores_(values_ + slice.heads * dim_padded_) {
    for (float* sum = activations_; sum < scores_; sum += 16) {
      Lanes::zero().store(sum);
    }
    for (int h = 0; h < slice.heads; ++h) {
      maxima_[h] = -__builtin_inff();
      denominators_[h] = absorbed_[h] = 0.0f;
    }
  }

  float* end() const { return scores_ + slice_.heads * std::int64_t{kChunkTokens}; }
  float* scores(int h) const { return scores_ + h * std::int64_t{kChunkTokens}; }
  // Sums: of activations (heads, padded), and of a head's values.
  float* activations() const { return activations_; }
  float* values(int h) const { return values_ + h * dim_padded_; }
  std::int64_t dim_padded() const { return dim_padded_; }

  // Scores of the chunk to weights; maximum, denominator and sums follow. `absorbs` says which positions
  // are absorbed.
  template <typename Absorbs>
  void weigh(int h, std::int32_t start, std::int32_t count, Absorbs absorbs) {
    float* const row = scores(h);
    const Lanes scale = Lanes::all(shape_.op.attention.scale);
    Lanes largest = Lanes::all(maxima_[h]);
    for (std::int32_t t = 0; t < count; t += 16) {
      const Lanes score = Lanes::load(row + t) * scale;
      score.store(row + t);
      largest = Lanes::max(Lanes::first(count - t, score, largest), largest);
    }
    const float maximum = largest.largest();
    if (start > 0 && maximum > maxima_[h]) {
      shrink(h, exp(Lanes::all(maxima_[h] - maximum)));
    }
    maxima_[h] = maximum;
    Lanes total = Lanes::zero();
    for (std::int32_t t = 0; t < count; t += 16) {
      const Lanes weight = exp(Lanes::load(row + t) - Lanes::all(maximum));
      weight.store(row + t);
      const Lanes seen = Lanes::first(count - t, weight, Lanes::zero());
      total = total + seen;
      if (absorbs(start + t)) {
        absorbed_[h] += seen.sum();
      }
    }
    denominators_[h] += total.sum();
  }

  void write_out(int h) const {
    const Lanes denominator = Lanes::all(denominators_[h]);
    float* out = shape_.out(slice_.sequence, slice_.first_head + h);
    in_sixteens(shape_.dim, [&](std::int64_t d, int some) {
      store_some(Lanes::load(values(h) + d) / denominator, out + d, some);
    });
    float* absorbed = shape_.absorbed(slice_.sequence, slice_.first_head + h);
    for (std::int64_t c = 0; c < shape_.padded; c += 16) {
      (Lanes::load(activations_ + h * shape_.padded + c) / denominator).store(absorbed + c);
    }
    absorbed[shape_.padded] = absorbed_[h] / denominators_[h];
  }

 private:
  void shrink(int h, Lanes factor) {
    const auto scale = [&](float* sums, std::int64_t size) {
      for (std::int64_t i = 0; i < size; i += 16) {
        (Lanes::load(sums + i) * factor).store(sums + i);
      }
    };
    scale(values(h), dim_padded_);
    scale(activations_ + h * shape_.padded, shape_.padded);
    float by[16];
    factor.store(by);
    denominators_[h] *= by[0];
    absorbed_[h] *= by[0];
  }

  const AbsorbedSlice& slice_;
  const AbsorbedShape& shape_;
  const std::int64_t dim_padded_;
  float* const activations_;  // (heads, padded)
  float* const values_;       // (heads, dim_padded)
  float* const scores_;       // (heads, kChunkTokens)
  float maxima_[Lanes::kTileRows], denominators_[Lanes::kTileRows];
  float absorbed_[Lanes::kTileRows];  // weights of absorbed positions
};

// One sequence's row for some of its heads, at most a tile of them.
template <typename T>
class AbsorbedTask {
 public:
  explicit AbsorbedTask(const AbsorbedSlice& slice)
      : slice_(slice),
        shape_(*slice.op),
        blocks_{*slice.op, slice.op->attention.sequences[slice.sequence]},
        context_slice_{.op = &slice.op->attention,
                       .sequence = &blocks_.sequence,
                       .kv_head = 0,
                       .kv_heads = slice.op->attention.kv_heads,
                       .first_head = 0,
                       .heads = 1,
                       .first_token = 0,
                       .tokens = 1,
                       .scratch = nullptr},
        context_(context_slice_, nullptr),
        queries_(slice.scratch),
        rows_(slice, shape_, queries_ + slice.heads * shape_.padded),
        transposed_(rows_.end()),
        block_(transposed_ + 16 * kGemmDepth) {}

  void run() {
    with_rows(slice_.heads, [&](auto rows) { attend<rows()>(); });
  }

 private:
  template <int kRows>
  void attend() {
    pack_tile(queries_, absorbed(0), shape_.row, kRows, shape_.hidden);
    float bias[kRows];  // q · b_K
    for (int h = 0; h < kRows; ++h) {
      bias[h] = absorbed(h)[shape_.padded];
    }
    const std::int32_t end = blocks_.sequence.context + 1;
    for (std::int32_t start = 0; start < end; start += kChunkTokens) {
      const std::int32_t count = end - start < kChunkTokens ? end - start : kChunkTokens;
      for (std::int32_t t = 0; t < count; t += kBlockTokens) {
        if (blocks_.absorbs(start + t)) {
          score_activations<kRows>(start, t, here(t, count), bias);
        } else {
          score_keys(start, t, here(t, count));
        }
      }
      for (int h = 0; h < kRows; ++h) {
        rows_.weigh(h, start, count, [&](std::int32_t at) { return blocks_.absorbs(at); });
      }
      for (std::int32_t t = 0; t < count; t += kBlockTokens) {
        if (blocks_.absorbs(start + t)) {
          add_activations<kRows>(start, t, here(t, count));
        } else {
          add_values(start, t, here(t, count));
        }
      }
    }
    for (int h = 0; h < kRows; ++h) {
      rows_.write_out(h);
    }
  }

  static std::int32_t here(std::int32_t t, std::int32_t count) {
    return count - t < kBlockTokens ? count - t : kBlockTokens;
  }
  const float* absorbed(int h) const {
    return shape_.absorbed(slice_.sequence, slice_.first_head + h);
  }
  std::int32_t kv_head(int h) const {
    return static_cast<std::int32_t>((slice_.first_head + h) / shape_.group);
  }

  // By itself, so that it is compiled once and not for each number of rows.
  [[gnu::noinline]] void gather_activations(const T* from, int count, std::int64_t depth) {
    transpose_16(transposed_, from, shape_.hidden, count, depth);
  }
  // Scores of the chunk's positions [t, t + count), all of one block.
  template <int kRows>
  void score_activations(std::int32_t start, std::int32_t t, int count, const float* bias) {
    const T* from = blocks_.activations(start + t);
    for (std::int64_t k = 0; k < shape_.hidden; k += kGemmDepth) {
      const std::int64_t depth = shape_.hidden - k < kGemmDepth ? shape_.hidden - k : kGemmDepth;
      gather_activations(from + k, count, depth);
      multiply_panels<kRows, 1>(Inputs<kRows, 1>{queries_ + k * kRows},
                                Panels<float>{transposed_, 0}, 1, depth,
                                Sums{rows_.scores(0) + t, kChunkTokens}, k > 0);
    }
    for (int h = 0; h < kRows; ++h) {
      float* const score = rows_.scores(h) + t;
      (Lanes::load(score) + Lanes::all(bias[h])).store(score);
    }
  }
  void score_keys(std::int32_t start, std::int32_t t, int count) {
    for (int h = 0; h < slice_.heads; ++h) {
      score_in_place<1, true>(shape_.query(slice_.sequence, slice_.first_head + h), 0,
                              context_.keys(kv_head(h), (start + t) / kBlockTokens, count), count,
                              shape_.dim, Sums{rows_.scores(h) + t, 0}, [](int, std::int64_t) {});
    }
  }

  template <int kRows>
  void add_activations(std::int32_t start, std::int32_t t, int count) {
    const T* from = blocks_.activations(start + t);
    const Sums sums{rows_.activations(), shape_.padded};
    const Inputs<1, kChunkTokens> weights{rows_.scores(0) + t};
    if (shape_.hidden % 16 == 0) {
      multiply_panels<kRows, tile_panels(kRows)>(weights, Columns<T>{from, shape_.hidden},
                                                 shape_.padded / 16, count, sums, true);
    } else {
      copy_padded(from, shape_.hidden, shape_.hidden, count);
      multiply_panels<kRows, tile_panels(kRows)>(weights, Columns<float>{block_, shape_.padded},
                                                 shape_.padded / 16, count, sums, true);
    }
  }
  void add_values(std::int32_t start, std::int32_t t, int count) {
    for (int h = 0; h < slice_.heads; ++h) {
      const Columns<T> values = context_.values(kv_head(h), (start + t) / kBlockTokens, count);
      const std::int64_t panels = rows_.dim_padded() / 16;
      const Sums sums{rows_.values(h), 0};
      const Inputs<1, kChunkTokens> weights{rows_.scores(h) + t};
      if (shape_.dim % 16 == 0) {
        multiply_panels<1, tile_panels(1)>(weights, values, panels, count, sums, true);
      } else {
        copy_padded(values.data, values.step, shape_.dim, count);
        multiply_panels<1, tile_panels(1)>(weights, Columns<float>{block_, 16 * panels}, panels,
                                           count, sums, true);
      }
    }
  }
  // Rows of a block to block_, each with zeros up to a multiple of sixteen.
  void copy_padded(const T* from, std::int64_t step, std::int64_t width, int rows) {
    const std::int64_t padded = (width + 15) / 16 * 16;
    for (int i = 0; i < rows; ++i) {
      in_sixteens(width, [&](std::int64_t c, int some) {
        load_some(from + i * step + c, some).store(block_ + i * padded + c);
      });
    }
  }

  const AbsorbedSlice& slice_;
  const AbsorbedShape shape_;
  const AbsorbedBlocks<T> blocks_;
  const AttentionSlice context_slice_;
  const PlainContext<T> context_;
  float* const queries_;  // (hidden_size, heads)
  AbsorbedRows rows_;
  float* const transposed_;  // activations of a block, (kGemmDepth, 16)
  float* const block_;       // (block_tokens, padded)
};

inline void absorb_queries(const AbsorbedSlice& slice) {
  with_type(slice.op->w_kv.dtype, slice.op->w_kv.data, [&](const auto* typed) {
    absorb_columns<std::remove_const_t<std::remove_pointer_t<decltype(typed)>>>(slice);
  });
}
inline void absorbed_slice(const AbsorbedSlice& slice) {
  with_type(slice.op->w_kv.dtype, slice.op->w_kv.data, [&](const auto* typed) {
    AbsorbedTask<std::remove_const_t<std::remove_pointer_t<decltype(typed)>>>(slice).run();
  });
}
inline void absorbed_values(const AbsorbedSlice& slice) {
  with_type(slice.op->w_kv.dtype, slice.op->w_kv.data, [&](const auto* typed) {
    add_absorbed_values<std::remove_const_t<std::remove_pointer_t<decltype(typed)>>>(slice);
  });
}

}  // namespace
}  // namespace poise::cpu
