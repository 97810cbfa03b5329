#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "tests/kernels/exact_attention.h"
#include "tests/kernels/tensors.h"

namespace poise::test {
namespace {

struct Heads {
  std::int32_t heads, kv_heads, dim;
  std::int32_t window = 0;
};

// One sequence's queries, keys and values, and any number of ways to lay them into slots.
class Sequence {
 public:
  Sequence(Heads heads, std::int32_t tokens, DType dtype, std::uint32_t seed = 1)
      : heads_(heads),
        width_(heads.kv_heads * heads.dim),
        q_(normal_values(seed, static_cast<std::size_t>(tokens * heads.heads * heads.dim), 2)),
        kv_(dtype, normal_values(seed + 1, static_cast<std::size_t>(tokens * 2 * width_))),
        exact_q_(q_.begin(), q_.end()) {
    for (std::size_t i = 0; i < kv_.size(); ++i) {
      exact_kv_.push_back(static_cast<double>(kv_[i]));
    }
  }

  // Attends tokens [context, end) in parts of `part` tokens, blocks scattered over the buffers in an
  // order of `placement`; everything that no token owns is not a number.
  std::vector<float> run(std::int32_t context, std::int32_t end, std::int32_t part,
                         std::uint32_t placement, cpu::Workers& workers) const {
    const std::int32_t blocks = (end + 15) / 16;
    std::vector<std::uint32_t> slots(static_cast<std::size_t>(2 * blocks + 3));
    std::iota(slots.begin(), slots.end(), 0u);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(placement));
    const auto token_numbers = static_cast<std::size_t>(2 * width_);
    const std::size_t slot_numbers = 16 * token_numbers;
    const Stored garbage(kv_.dtype(), std::vector<float>(slots.size() * slot_numbers,
                                                         std::numeric_limits<float>::quiet_NaN()));
    Stored buffers[3] = {garbage, garbage, garbage};
    std::vector<ContextBlock> table(static_cast<std::size_t>(blocks));
    for (std::size_t b = 0; b < table.size(); ++b) {
      table[b] = {.slot = slots[b],
                  .buffer = static_cast<std::uint8_t>((slots[b] + placement) % 3)};
      const auto first = static_cast<std::int32_t>(16 * b);
      for (std::int32_t t = first; t < std::min(first + 16, end); ++t) {
        if (t / 16 >= first_seen(context) / 16) {
          const auto slot_token = 16 * slots[b] + static_cast<std::size_t>(t - first);
          buffers[table[b].buffer].copy(slot_token * token_numbers, kv_,
                                        static_cast<std::size_t>(t) * token_numbers, token_numbers);
        }
      }
    }
    const auto row = static_cast<std::size_t>(heads_.heads * heads_.dim);
    std::vector<float> out(static_cast<std::size_t>(end - context) * row, -7);
    for (std::int32_t at = context; at < end; at += part) {
      const AttentionSequence sequence{.first_row = at - context,
                                       .new_tokens = std::min(part, end - at),
                                       .context = at,
                                       .first_block = 0};
      cpu::attention({.out = out.data(),
                      .q = q_.data() + static_cast<std::size_t>(context) * row,
                      .slots = {buffers[0].data(), buffers[1].data(), buffers[2].data()},
                      .dtype = kv_.dtype(),
                      .blocks = table.data(),
                      .sequences = &sequence,
                      .sequence_count = 1,
                      .heads = heads_.heads,
                      .kv_heads = heads_.kv_heads,
                      .head_dim = heads_.dim,
                      .scale = scale(),
                      .window = heads_.window},
                     workers);
    }
    return out;
  }

  // The first position that the row at `position` attends.
  std::int32_t first_seen(std::int32_t position) const {
    return heads_.window == 0 ? 0 : std::max(0, position + 1 - heads_.window);
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(heads_.dim)); }

  // Row `token` in float64.
  std::vector<double> exact(std::int32_t token, std::int32_t head) const {
    const std::int32_t kv_head = head / (heads_.heads / heads_.kv_heads);
    const std::int32_t first = first_seen(token), dim = heads_.dim;
    const auto row = static_cast<std::size_t>((token * heads_.heads + head) * dim);
    const double* const query = &exact_q_[row];
    const auto stored = [&](std::int32_t t, std::int32_t which) {
      return &exact_kv_[static_cast<std::size_t>((t * 2 + which) * width_ + kv_head * dim)];
    };
    return exact_attention(query, first, token, dim, scale(), stored);
  }

  void expect_right(const std::vector<float>& out, std::int32_t context, std::int32_t end) const {
    // A score is a sum of head_dim products of some N(0, 2)·N(0, 1) and errs by about
    // 2·√dim·dim·2⁻²⁴·scale; what it weighs errs by that share, and sums of values |v| < 6.
    const double tolerance = 6 * (8.0 * heads_.dim + 2.0 * end) * 0x1p-24;
    for (std::int32_t token = context; token < end; ++token) {
      for (std::int32_t head = 0; head < heads_.heads; ++head) {
        const std::vector<double> expected = exact(token, head);
        for (std::size_t d = 0; d < expected.size(); ++d) {
          const auto at =
              static_cast<std::size_t>(((token - context) * heads_.heads + head) * heads_.dim) + d;
          ASSERT_NEAR(static_cast<double>(out[at]), expected[d], tolerance)
              << "token " << token << " head " << head << " at " << d;
        }
      }
    }
  }

 private:
  Heads heads_;
  std::int32_t width_;
  std::vector<float> q_;  // (tokens, heads, dim)
  Stored kv_;             // (tokens, 2, kv_heads, dim)
  std::vector<double> exact_q_, exact_kv_;  // the same
};

TEST(Attention, IsSoftmaxOverWhatEachTokenMaySee) {
  cpu::Workers workers(2);
  for (const Heads heads : {Heads{1, 1, 1}, Heads{2, 2, 32}, Heads{3, 3, 64}, Heads{2, 2, 80},
                            Heads{1, 1, 128}, Heads{1, 1, 256}, Heads{3, 1, 20}}) {
    for (const DType dtype : kAllTypes) {
      for (const std::int32_t tokens : {1, 2, 16, 17, 70, 140}) {
        SCOPED_TRACE(testing::Message() << heads.heads << " heads of " << heads.dim << ", "
                                        << tokens << " tokens of " << name_of(dtype));
        const Sequence sequence(heads, tokens, dtype);
        sequence.expect_right(sequence.run(0, tokens, tokens, 1, workers), 0, tokens);
      }
    }
  }
}

TEST(Attention, SharesKeysAmongTheQueryHeadsOfAGroup) {
  cpu::Workers workers(2);
  for (const Heads heads : {Heads{8, 2, 16}, Heads{6, 1, 48}, Heads{71, 1, 8}}) {
    const Sequence sequence(heads, 40, DType::float32);
    sequence.expect_right(sequence.run(0, 40, 40, 2, workers), 0, 40);
  }
}

TEST(Attention, OfOneNewTokenSeesItsWholeContext) {
  cpu::Workers workers(2);
  for (const std::int32_t context : {0, 1, 15, 16, 127, 128, 129, 500}) {
    const Sequence sequence({2, 2, 64}, context + 1, DType::float16);
    sequence.expect_right(sequence.run(context, context + 1, 1, 3, workers), context, context + 1);
  }
}

// Blocks before every row's window hold what is not a number.
TEST(Attention, WithAWindowSeesItsLastPositionsAlone) {
  cpu::Workers workers(2);
  for (const Heads heads : {Heads{1, 1, 64, 1}, Heads{2, 2, 32, 3}, Heads{2, 2, 20, 16},
                            Heads{8, 2, 32, 50}, Heads{4, 1, 24, 129}, Heads{2, 1, 16, 1000}}) {
    for (const std::int32_t context : {0, 1, 15, 16, 130, 299}) {
      SCOPED_TRACE(testing::Message() << "a window of " << heads.window << " after " << context);
      const Sequence sequence(heads, 300, DType::bfloat16);
      sequence.expect_right(sequence.run(context, 300, 300 - context, 4, workers), context, 300);
    }
  }
}

TEST(AttentionBits, AreTheSameInPartsOfAnySizeAndFromAnySlots) {
  cpu::Workers workers(2);
  for (const Heads heads : {Heads{2, 2, 64}, Heads{4, 2, 80}, Heads{2, 2, 64, 5},
                            Heads{8, 1, 80, 100}, Heads{3, 3, 32, 40}}) {
    const Sequence sequence(heads, 301, DType::bfloat16);
    const std::vector<float> whole = sequence.run(0, 301, 301, 1, workers);
    std::uint32_t placement = 2;
    for (const std::int32_t part : {1, 2, 15, 16, 17, 33, 64, 65, 128, 200}) {
      EXPECT_TRUE(same_bits(sequence.run(0, 301, part, placement++, workers), whole)) << part;
    }
  }
}

TEST(AttentionBits, AreTheSameOnEveryInstructionSetAndNumberOfWorkers) {
  for (const DType dtype : kAllTypes) {
    const Sequence sequence({4, 2, 72, dtype == DType::float16 ? 61 : 0}, 270, dtype);
    cpu::Workers one(1);
    const std::vector<float> expected = sequence.run(0, 270, 270, 1, one);
    for (const int threads : {2, 3}) {
      cpu::Workers workers(threads);
      for (const cpu::Isa isa : cpu::available_isas()) {
        under(isa, [&] {
          EXPECT_TRUE(same_bits(sequence.run(0, 270, 135, 4, workers), expected))
              << cpu::name_of(isa) << ", " << name_of(dtype);
        });
      }
    }
  }
}

TEST(AttentionBits, OfASequenceDoNotDependOnTheOnesBesideIt) {
  cpu::Workers workers(3);
  constexpr Heads kHeads{2, 2, 32};
  constexpr std::size_t kRow = 2 * 32;
  // Sequences of many lengths, each in blocks of its own, new tokens last.
  const std::vector<std::pair<std::int32_t, std::int32_t>> context_and_new = {
      {0, 1}, {33, 1}, {0, 70}, {128, 5}, {15, 1}, {140, 0}, {16, 16}, {200, 1}};
  std::vector<ContextBlock> blocks;
  std::vector<AttentionSequence> sequences;
  std::int32_t rows = 0;
  for (const auto& [context, fresh] : context_and_new) {
    sequences.push_back({rows, fresh, context, static_cast<std::int32_t>(blocks.size())});
    for (std::int32_t b = 0; b < (context + fresh + 15) / 16; ++b) {
      blocks.push_back({.slot = static_cast<std::uint32_t>(blocks.size())});
    }
    rows += fresh;
  }
  const std::vector<float> q = normal_values(1, static_cast<std::size_t>(rows) * kRow);
  const std::vector<float> slots = normal_values(2, blocks.size() * 16 * 2 * kRow);
  const auto attend = [&](const std::vector<AttentionSequence>& some, std::vector<float>* out) {
    cpu::attention({.out = out->data(),
                    .q = q.data(),
                    .slots = {slots.data(), nullptr, nullptr},
                    .dtype = DType::float32,
                    .blocks = blocks.data(),
                    .sequences = some.data(),
                    .sequence_count = static_cast<std::int32_t>(some.size()),
                    .heads = kHeads.heads,
                    .kv_heads = kHeads.kv_heads,
                    .head_dim = kHeads.dim,
                    .scale = 0.2f},
                   workers);
  };
  std::vector<float> together(q.size());
  attend(sequences, &together);
  std::vector<float> apart(q.size());
  for (const AttentionSequence& sequence : sequences) {
    attend({sequence}, &apart);
  }
  EXPECT_TRUE(same_bits(together, apart));
}

TEST(Attention, OfMoreSequencesThanATableHoldsServesThemAll) {
  cpu::Workers workers(2);
  constexpr std::int32_t kSequences = 2500;
  const std::vector<float> slot = normal_values(5, 16 * 2 * 16);
  const std::vector<float> q(kSequences * 16, 1.0f);
  std::vector<float> out(q.size(), 0);
  const ContextBlock block{};
  std::vector<AttentionSequence> sequences;
  for (std::int32_t s = 0; s < kSequences; ++s) {
    sequences.push_back({s, 1, s % 16, 0});
  }
  cpu::attention({.out = out.data(),
                  .q = q.data(),
                  .slots = {slot.data(), nullptr, nullptr},
                  .dtype = DType::float32,
                  .blocks = &block,
                  .sequences = sequences.data(),
                  .sequence_count = kSequences,
                  .heads = 1,
                  .kv_heads = 1,
                  .head_dim = 16,
                  .scale = 1},
                 workers);
  for (std::size_t i = 0; i < out.size(); ++i) {
    ASSERT_EQ(out[i], out[i % 256]);
    ASSERT_NE(out[i], 0.0f);
  }
}

// A value that overflowed must spoil the tokens that see it, and no other.
TEST(Attention, KeepsWhatIsNotFiniteToTheTokensThatSeeIt) {
  cpu::Workers workers(1);
  std::vector<float> slot(16 * 2 * 8, 0.5f);
  slot[(9 * 2 + 1) * 8 + 3] = std::numeric_limits<float>::infinity();
  const std::vector<float> q(16 * 8, 0.25f);
  std::vector<float> out(q.size());
  const ContextBlock block{};
  const AttentionSequence sequence{0, 16, 0, 0};
  cpu::attention({.out = out.data(),
                  .q = q.data(),
                  .slots = {slot.data(), nullptr, nullptr},
                  .dtype = DType::float32,
                  .blocks = &block,
                  .sequences = &sequence,
                  .sequence_count = 1,
                  .heads = 1,
                  .kv_heads = 1,
                  .head_dim = 8,
                  .scale = 1},
                 workers);
  for (std::size_t token = 0; token < 16; ++token) {
    EXPECT_EQ(std::isfinite(out[token * 8 + 3]), token < 9) << token;
    EXPECT_FLOAT_EQ(out[token * 8 + 4], 0.5f) << token;
  }
}

}  // namespace
}  // namespace poise::test
