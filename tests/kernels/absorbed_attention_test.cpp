#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>

#include "tests/kernels/tensors.h"

namespace poise::test {
namespace {

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
  AbsorbedCase(const AbsorbedShape& shape, std::vector<std::int32_t> contexts,
               std::uint32_t seed = 1)
      : shape_(shape),
        contexts_(std::move(contexts)),
        width_(shape.kv_heads * shape.dim),
        weight_(shape.dtype, normal_values(seed, size(2 * width_ * shape.hidden),
                                           1 / std::sqrt(static_cast<float>(shape.hidden)))),
        packed_(weight_, 2 * width_, shape.hidden),
        bias_(shape.dtype, normal_values(seed + 1, size(2 * width_), shape.bias ? 1 : 0)),
        q_(normal_values(seed + 2, size(rows() * shape.heads * shape.dim), 2)) {
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

  // What the operation leaves in `out`. Blocks lie in slots of an order of `placement`; what no token owns is
  // not a number. `which` names the blocks that are absorbed, and with them the bits. Without room for a row,
  // Attention runs instead.
  std::vector<float> run(Reads reads, std::uint32_t placement, std::int32_t scratch_rows,
                         cpu::Workers& workers, std::uint32_t which = 1) const {
    std::int32_t blocks = 0;
    for (const std::int32_t context : contexts_) {
      blocks += context / 16 + 1;
    }
    std::vector<std::uint32_t> slots(size(2 * blocks));
    std::iota(slots.begin(), slots.end(), 0u);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(placement));
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const std::vector<float> garbage(slots.size() * size(16 * 2 * width_), nan);
    Stored buffers[3] = {Stored(shape_.dtype, garbage), Stored(shape_.dtype, garbage),
                         Stored(shape_.dtype, garbage)};
    Stored act(shape_.dtype, std::vector<float>(slots.size() * size(16 * shape_.hidden), nan));
    std::vector<ContextBlock> table;
    std::vector<AttentionSequence> sequences;
    for (std::size_t s = 0; s < contexts_.size(); ++s) {
      sequences.push_back({.first_row = static_cast<std::int32_t>(s),
                           .new_tokens = 1,
                           .context = contexts_[s],
                           .first_block = static_cast<std::int32_t>(table.size())});
      for (std::int32_t b = 0; b * 16 <= contexts_[s]; ++b) {
        const std::uint32_t slot = slots[table.size()];
        const bool absorbed = is_absorbed(reads, static_cast<std::uint32_t>(s), b, which);
        table.push_back(
            {.slot = slot,
             .buffer = static_cast<std::uint8_t>(absorbed ? 3 : (slot + placement) % 3)});
        const std::int32_t row = absorbed ? shape_.hidden : 2 * width_;
        const Stored& from = absorbed ? act_[s] : kv_[s];
        Stored& to = absorbed ? act : buffers[table.back().buffer];
        const std::int32_t here = std::min(16, contexts_[s] + 1 - 16 * b);
        for (std::int32_t i = 0; i < here * row; ++i) {
          to.set(size(16 * row) * slot + size(i), from[size(16 * b * row + i)]);
        }
      }
    }
    std::shuffle(sequences.begin(), sequences.end(), std::mt19937(placement));
    std::vector<float> out(q_.size(), nan);
    std::vector<float> scratch(
        size(scratch_rows * shape_.heads) * size(absorbed_row_floats(shape_.hidden)), nan);
    const Attention attention{.out = out.data(),
                              .q = q_.data(),
                              .slots = {buffers[0].data(), buffers[1].data(), buffers[2].data()},
                              .dtype = shape_.dtype,
                              .blocks = table.data(),
                              .sequences = sequences.data(),
                              .sequence_count = rows(),
                              .heads = shape_.heads,
                              .kv_heads = shape_.kv_heads,
                              .head_dim = shape_.dim,
                              .scale = scale()};
    if (scratch_rows == 0) {
      cpu::attention(attention, workers);
      return out;
    }
    cpu::absorbed_attention({.attention = attention,
                             .act = act.data(),
                             .w_kv = packed_.matrix(),
                             .b_kv = shape_.bias ? bias_.data() : nullptr,
                             .scratch = scratch.data(),
                             .scratch_rows = scratch_rows},
                            workers);
    return out;
  }

  // Every output beside float64. Keys and values that are read were rounded when they were stored; those of absorbed
  // positions never were.
  void expect_right(const std::vector<float>& out, Reads reads, std::uint32_t which = 1) const {
    // A score is a sum of hidden_size products and errs by some √hidden · 2⁻²⁴ of N(0, 2); so does a value.
    const double roundings = std::sqrt(shape_.hidden) + std::sqrt(shape_.dim);
    for (std::int32_t s = 0; s < rows(); ++s) {
      const double tolerance = (24 * roundings + 2 * contexts_[size(s)]) * 0x1p-24;
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
  const std::vector<std::int32_t> contexts_;
  const std::int32_t width_;
  Stored weight_;  // (2 · kv_dim, hidden), rows of W_K before those of W_V
  PackedWeight packed_;
  Stored bias_;                                // (2 · kv_dim)
  std::vector<float> q_;                       // (rows, heads, dim)
  std::vector<Stored> act_;                    // by sequence: (tokens, hidden)
  std::vector<std::vector<double>> exact_kv_;  // by sequence: (tokens, 2 · kv_dim)
  std::vector<Stored> kv_;                     // … rounded
};

TEST(AbsorbedAttention, IsAttentionOverKeysAndValuesThatAreNeverMade) {
  cpu::Workers workers(2);
  for (const AbsorbedShape& heads :
       {AbsorbedShape{3, 3, 8, 24}, AbsorbedShape{2, 2, 32, 64}, AbsorbedShape{1, 1, 1, 1},
        AbsorbedShape{13, 13, 16, 208}, AbsorbedShape{3, 3, 20, 60}, AbsorbedShape{1, 1, 250, 48},
        AbsorbedShape{2, 2, 20, 1100}, AbsorbedShape{6, 2, 16, 40}}) {
    for (const DType dtype : kAllTypes) {
      for (const bool bias : {true, false}) {
        SCOPED_TRACE(testing::Message() << heads.heads << " heads of " << heads.dim << ", "
                                        << name_of(dtype) << (bias ? "" : ", no bias"));
        AbsorbedShape shape = heads;
        shape.dtype = dtype;
        shape.bias = bias;
        const AbsorbedCase one(shape, {0, 15, 16, 40});
        for (const Reads reads : {Reads::mixed, Reads::activations, Reads::keys}) {
          one.expect_right(one.run(reads, 3, 2, workers), reads);
        }
      }
    }
  }
}

TEST(AbsorbedAttention, TakesALongContextChunkByChunk) {
  cpu::Workers workers(2);
  for (const std::int32_t context : {127, 128, 129, 500}) {
    const AbsorbedCase one({2, 2, 64, 128, DType::float16}, {context});
    for (std::uint32_t which = 0; which < 4; ++which) {
      one.expect_right(one.run(Reads::mixed, which, 1, workers, which), Reads::mixed, which);
    }
  }
}

TEST(AbsorbedAttentionBits, AreThoseOfAttentionWhereEveryBlockHoldsKeys) {
  cpu::Workers workers(2);
  for (const DType dtype : kAllTypes) {
    const AbsorbedCase one({3, 3, 32, 96, dtype}, {0, 15, 140, 300});
    EXPECT_TRUE(
        same_bits(one.run(Reads::keys, 2, 3, workers), one.run(Reads::keys, 1, 0, workers)));
  }
}

// The same bits in any slots, beside any other sequences, with any room, threads and instruction set.
TEST(AbsorbedAttentionBits, DependOnWhichBlocksAreAbsorbedAlone) {
  for (const AbsorbedShape& shape :
       {AbsorbedShape{4, 4, 64, 256, DType::bfloat16}, AbsorbedShape{14, 14, 20, 280},
        AbsorbedShape{6, 3, 16, 1048, DType::float16}}) {
    const AbsorbedCase one(shape, {0, 15, 16, 140, 33});
    cpu::Workers alone(1);
    const std::vector<float> expected = one.run(Reads::mixed, 1, 5, alone);
    std::uint32_t placement = 2;
    for (const int threads : {1, 2, 3}) {
      cpu::Workers workers(threads);
      for (const std::int32_t room : {1, 2, 64}) {
        EXPECT_TRUE(same_bits(one.run(Reads::mixed, placement++, room, workers), expected));
      }
      for (const cpu::Isa isa : cpu::available_isas()) {
        under(isa, [&] {
          EXPECT_TRUE(same_bits(one.run(Reads::mixed, placement++, 5, workers), expected))
              << cpu::name_of(isa);
        });
      }
    }
    EXPECT_FALSE(same_bits(one.run(Reads::activations, 1, 5, alone), expected));
  }
}

}  // namespace
}  // namespace poise::test
