#pragma once
// Absorbed attention held to float64: a layer's W_K and W_V, sequences whose keys and values come from their attention
// inputs, and any number of ways to lay them into slots. The tests of both devices use it.

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "common/kernel_limits.h"
#include "kernels/kernels.h"
#include "tests/kernels/tensors.h"

namespace poise::test {

struct AbsorbedShape {
  std::int32_t heads, kv_heads, dim, hidden;
  DType dtype = DType::float32;
  bool bias = true;
};

// Where the blocks of a sequence are read.
enum class Reads : std::uint8_t { mixed, activations, keys };

// A layer's W_K and W_V, and sequences whose keys and values come from their attention inputs.
class AbsorbedCase {
 public:
  // `row_dtype`: of queries and outputs.
  AbsorbedCase(const AbsorbedShape& shape, std::vector<std::int32_t> contexts,
               DType row_dtype = DType::float32, std::uint32_t seed = 1)
      : shape_(shape),
        row_dtype_(row_dtype),
        contexts_(std::move(contexts)),
        width_(shape.kv_heads * shape.dim),
        weight_(shape.dtype, normal_values(seed, size(2 * width_ * shape.hidden),
                                           1 / std::sqrt(static_cast<float>(shape.hidden)))),
        bias_(shape.dtype, normal_values(seed + 1, size(2 * width_), shape.bias ? 1 : 0)),
        q_(rounded(normal_values(seed + 2, size(rows() * shape.heads * shape.dim), 2), row_dtype)) {
    for (std::size_t s = 0; s < contexts_.size(); ++s) {
      const std::int32_t tokens = contexts_[s] + 1;
      act_.emplace_back(shape.dtype, normal_values(seed + 3 + static_cast<std::uint32_t>(s),
                                                   size(tokens * shape.hidden)));
      exact_kv_.push_back(keys_and_values(act_.back(), tokens));
      kv_.emplace_back(shape.dtype,
                       std::vector<float>(exact_kv_.back().begin(), exact_kv_.back().end()));
    }
  }

  std::int32_t rows() const { return static_cast<std::int32_t>(contexts_.size()); }

  // Its blocks and tables. They lie in slots of an order of `placement`, the sequences too; what no token owns is
  // not a number. `which` names the blocks that are absorbed, and with them the bits.
  struct Layout {
    Stored buffers[3];
    Stored act;
    std::vector<ContextBlock> table;
    std::vector<AttentionSequence> sequences;
  };
  Layout lay_out(Reads reads, std::uint32_t placement, std::uint32_t which = 1) const {
    std::int32_t blocks = 0;
    for (const std::int32_t context : contexts_) {
      blocks += context / 16 + 1;
    }
    std::vector<std::uint32_t> slots(size(2 * blocks));
    std::iota(slots.begin(), slots.end(), 0u);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(placement));
    const std::vector<float> garbage(slots.size() * size(16 * 2 * width_), kNan);
    const Stored empty(shape_.dtype, garbage);
    Layout layout{
        {empty, empty, empty},
        Stored(shape_.dtype, std::vector<float>(slots.size() * size(16 * shape_.hidden), kNan)),
        {},
        {}};
    for (std::size_t s = 0; s < contexts_.size(); ++s) {
      layout.sequences.push_back({.first_row = static_cast<std::int32_t>(s),
                                  .new_tokens = 1,
                                  .context = contexts_[s],
                                  .first_block = static_cast<std::int32_t>(layout.table.size())});
      for (std::int32_t b = 0; b * 16 <= contexts_[s]; ++b) {
        const std::uint32_t slot = slots[layout.table.size()];
        const bool absorbed = is_absorbed(reads, static_cast<std::uint32_t>(s), b, which);
        layout.table.push_back(
            {.slot = slot,
             .buffer = static_cast<std::uint8_t>(absorbed ? 3 : (slot + placement) % 3)});
        const std::int32_t row = absorbed ? shape_.hidden : 2 * width_;
        const Stored& from = absorbed ? act_[s] : kv_[s];
        Stored& to = absorbed ? layout.act : layout.buffers[layout.table.back().buffer];
        const std::int32_t here = std::min(16, contexts_[s] + 1 - 16 * b);
        for (std::int32_t i = 0; i < here * row; ++i) {
          to.set(size(16 * row) * slot + size(i), from[size(16 * b * row + i)]);
        }
      }
    }
    std::shuffle(layout.sequences.begin(), layout.sequences.end(), std::mt19937(placement));
    return layout;
  }

  // Without any pointer.
  Attention attention() const {
    return {.dtype = shape_.dtype,
            .row_dtype = row_dtype_,
            .sequence_count = rows(),
            .heads = shape_.heads,
            .kv_heads = shape_.kv_heads,
            .head_dim = shape_.dim,
            .scale = scale(),
            .max_new_tokens = 1,
            .max_context = *std::ranges::max_element(contexts_) + 1};
  }
  std::size_t scratch_floats(std::int32_t scratch_rows, std::int32_t max_context) const {
    return size(scratch_rows * shape_.heads) *
           size(absorbed_row_floats(shape_.hidden, shape_.dim, max_context));
  }
  const AbsorbedShape& shape() const { return shape_; }
  const Stored& weight() const { return weight_; }
  const Stored& bias() const { return bias_; }
  std::int32_t weight_rows() const { return 2 * width_; }
  const std::vector<float>& q() const { return q_; }

  static constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

  // Every output beside float64. Keys and values that are read were rounded when they were stored; those of absorbed
  // positions never were. `more`: what is allowed beyond the roundings of float32.
  void expect_right(const std::vector<float>& out, Reads reads, std::uint32_t which = 1,
                    double more = 0) const {
    // A score is a sum of hidden_size products and errs by some √hidden · 2⁻²⁴ of N(0, 2); so does a value.
    const double roundings = std::sqrt(shape_.hidden) + std::sqrt(shape_.dim);
    for (std::int32_t s = 0; s < rows(); ++s) {
      const double tolerance = (24 * roundings + 2 * contexts_[size(s)]) * 0x1p-24 + more;
      for (std::int32_t head = 0; head < shape_.heads; ++head) {
        const std::vector<double> expected = exact(size(s), head, reads, which);
        for (std::int32_t d = 0; d < shape_.dim; ++d) {
          ASSERT_NEAR(static_cast<double>(out[size((s * shape_.heads + head) * shape_.dim + d)]),
                      expected[size(d)], tolerance)
              << "sequence " << s << " head " << head << " at " << d;
        }
      }
    }
  }

 private:
  static std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }
  static std::vector<float> rounded(const std::vector<float>& values, DType dtype) {
    const Stored stored(dtype, values);
    std::vector<float> all(values.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = stored[i];
    }
    return all;
  }
  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.dim)); }
  static bool is_absorbed(Reads reads, std::uint32_t sequence, std::int32_t block,
                          std::uint32_t which) {
    return reads == Reads::activations ||
           (reads == Reads::mixed &&
            (static_cast<std::uint32_t>(block) * 5 + sequence * 3 + which) % 4 < 2);
  }

  static std::vector<double> numbers(const Stored& stored) {
    std::vector<double> all(stored.size());
    for (std::size_t i = 0; i < all.size(); ++i) {
      all[i] = static_cast<double>(stored[i]);
    }
    return all;
  }
  // (tokens, 2 · kv_dim)
  std::vector<double> keys_and_values(const Stored& act, std::int32_t tokens) const {
    const std::vector<double> weight = numbers(weight_), inputs = numbers(act);
    std::vector<double> kv;
    for (std::int32_t token = 0; token < tokens; ++token) {
      for (std::int32_t n = 0; n < 2 * width_; ++n) {
        const double* row = &weight[size(n * shape_.hidden)];
        kv.push_back(std::inner_product(row, row + shape_.hidden,
                                        &inputs[size(token * shape_.hidden)],
                                        shape_.bias ? static_cast<double>(bias_[size(n)]) : 0.0));
      }
    }
    return kv;
  }

  std::vector<double> exact(std::size_t s, std::int32_t head, Reads reads,
                            std::uint32_t which) const {
    const std::int32_t kv_head = head / (shape_.heads / shape_.kv_heads);
    const auto number = [&](std::int32_t t, std::int32_t n) {
      return is_absorbed(reads, static_cast<std::uint32_t>(s), t / 16, which)
                 ? exact_kv_[s][size(t * 2 * width_ + n)]
                 : static_cast<double>(kv_[s][size(t * 2 * width_ + n)]);
    };
    std::vector<double> scores;
    for (std::int32_t t = 0; t <= contexts_[s]; ++t) {
      double score = 0;
      for (std::int32_t d = 0; d < shape_.dim; ++d) {
        score += static_cast<double>(
                     q_[(s * size(shape_.heads) + size(head)) * size(shape_.dim) + size(d)]) *
                 number(t, kv_head * shape_.dim + d);
      }
      scores.push_back(score * static_cast<double>(scale()));
    }
    const double maximum = *std::ranges::max_element(scores);
    double denominator = 0;
    std::vector<double> out(size(shape_.dim));
    for (std::int32_t t = 0; t <= contexts_[s]; ++t) {
      const double weight = std::exp(scores[size(t)] - maximum);
      denominator += weight;
      for (std::int32_t d = 0; d < shape_.dim; ++d) {
        out[size(d)] += weight * number(t, width_ + kv_head * shape_.dim + d);
      }
    }
    for (double& x : out) {
      x /= denominator;
    }
    return out;
  }

  const AbsorbedShape shape_;
  const DType row_dtype_;
  const std::vector<std::int32_t> contexts_;
  const std::int32_t width_;
  Stored weight_;            // (2 · kv_dim, hidden), rows of W_K before those of W_V
  Stored bias_;              // (2 · kv_dim)
  std::vector<float> q_;     // (rows, heads, dim)
  std::vector<Stored> act_;  // by sequence: (tokens, hidden)
  std::vector<std::vector<double>> exact_kv_;  // by sequence: (tokens, 2 · kv_dim)
  std::vector<Stored> kv_;                     // … rounded
};

}  // namespace poise::test
