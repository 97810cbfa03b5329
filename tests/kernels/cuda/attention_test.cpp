// Attention on the GPU, held to the CPU's, and its bits to themselves.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "tests/kernels/cuda/on_device.h"

namespace poise::test {
namespace {

class CudaAttention : public CudaTest {};
class CudaAttentionBits : public CudaTest {};

struct Heads {
  std::int32_t heads, kv_heads, dim;
  std::int32_t window = 0;
};
std::ostream& operator<<(std::ostream& out, const Heads& heads) {
  return out << heads.heads << " heads on " << heads.kv_heads << " of " << heads.dim << ", window "
             << heads.window;
}

// One sequence's queries, keys and values, and any number of ways to lay them into slots.
class Sequence {
 public:
  Sequence(Heads heads, std::int32_t tokens, DType dtype, std::uint32_t seed = 1)
      : heads_(heads),
        row_(static_cast<std::size_t>(heads.heads * heads.dim)),
        kv_row_(static_cast<std::size_t>(2 * heads.kv_heads * heads.dim)),
        q_(dtype, normal_values(seed, static_cast<std::size_t>(tokens) * row_, 2)),
        kv_(dtype, normal_values(seed + 1, static_cast<std::size_t>(tokens) * kv_row_)) {}

  // The same keys and values, and of the queries one head's alone. REQUIRES: kv_heads 1.
  Sequence of_head(std::int32_t head) const {
    Sequence one = *this;
    one.heads_.heads = 1;
    one.row_ = static_cast<std::size_t>(heads_.dim);
    one.q_ = Stored(q_.dtype(), numbers_of_head(floats_of(q_), head));
    return one;
  }
  // Scores that rise with the position, by some e^2.5 from tile to tile times a factor that differs from row to row: the
  // maximum that weights are counted from follows at other tiles in each row.
  Sequence rising() const {
    Sequence other = *this;
    std::vector<float> q = floats_of(q_);
    for (std::size_t i = 0; i < q.size(); ++i) {
      q[i] += 0.5f * static_cast<float>(i / static_cast<std::size_t>(heads_.dim) % 5);
    }
    std::vector<float> kv = floats_of(kv_);
    for (std::size_t i = 0; i < kv.size(); ++i) {
      if (i % kv_row_ < kv_row_ / 2) {  // a key
        kv[i] += 2.5f / 64 * static_cast<float>(i / kv_row_) /
                 std::sqrt(static_cast<float>(heads_.dim));
      }
    }
    other.q_ = Stored(q_.dtype(), q);
    other.kv_ = Stored(kv_.dtype(), kv);
    return other;
  }
  // Of rows of all heads, that head's.
  std::vector<float> numbers_of_head(const std::vector<float>& rows, std::int32_t head) const {
    const auto dim = static_cast<std::size_t>(heads_.dim);
    std::vector<float> some;
    for (std::size_t at = static_cast<std::size_t>(head) * dim; at < rows.size(); at += row_) {
      some.insert(some.end(), rows.begin() + static_cast<std::ptrdiff_t>(at),
                  rows.begin() + static_cast<std::ptrdiff_t>(at + dim));
    }
    return some;
  }

  // Attends tokens [context, end) in parts, blocks scattered over three buffers in an order of
  // `placement`; everything that no token owns is not a number, and what lies before all windows.
  std::vector<float> run(std::int32_t context, std::int32_t end, std::int32_t part,
                         std::uint32_t placement) const {
    const LayoutOnDevice there(lay_out(context, end, placement), q_);
    const StoredOnDevice out(
        Stored(q_.dtype(), std::vector<float>(static_cast<std::size_t>(end) * row_, -7)));
    std::vector<AttentionSequence> parts;
    for (std::int32_t at = context; at < end; at += part) {
      parts.push_back({at, std::min(part, end - at), at, 0});
    }
    const OnDevice<AttentionSequence> sequences(parts);
    for (std::size_t p = 0; p < parts.size(); ++p) {
      Attention op = operation(q_.dtype(), parts[p]);
      op.out = out.get();
      there.give(op);
      op.sequences = sequences.get() + p;
      cuda::attention(op, nullptr);
    }
    std::vector<float> all = floats_of(out.read());
    for (std::size_t i = 0; i < static_cast<std::size_t>(context) * row_; ++i) {
      EXPECT_EQ(all[i], -7) << "a row before the first new one was written";
    }
    return {all.begin() + static_cast<std::ptrdiff_t>(context) * static_cast<std::ptrdiff_t>(row_),
            all.end()};
  }

  // Attends each of `tokens` as a decoding row, all of them in one launch that is told `max_context`;
  // once for each of those. Rows in the order of `tokens`.
  std::vector<std::vector<float>> decode(const std::vector<std::int32_t>& tokens,
                                         const std::vector<std::int32_t>& max_contexts,
                                         std::uint32_t placement) const {
    const std::int32_t end = *std::max_element(tokens.begin(), tokens.end()) + 1;
    const LayoutOnDevice there(
        lay_out(*std::min_element(tokens.begin(), tokens.end()), end, placement), q_);
    std::vector<AttentionSequence> rows;
    for (const std::int32_t token : tokens) {
      rows.push_back({.first_row = token, .new_tokens = 1, .context = token, .first_block = 0});
    }
    const OnDevice<AttentionSequence> sequences(rows);
    std::vector<std::vector<float>> results;
    for (const std::int32_t max_context : max_contexts) {
      const StoredOnDevice out(
          Stored(q_.dtype(), std::vector<float>(static_cast<std::size_t>(end) * row_, -7)));
      Attention op = operation(q_.dtype(), rows.front());
      op.sequence_count = static_cast<std::int32_t>(rows.size());
      op.max_context = max_context;
      op.out = out.get();
      there.give(op);
      op.sequences = sequences.get();
      cuda::attention(op, nullptr);
      const std::vector<float> all = floats_of(out.read());
      std::vector<float>& result = results.emplace_back();
      for (const std::int32_t token : tokens) {
        const auto from =
            all.begin() + static_cast<std::ptrdiff_t>(token) * static_cast<std::ptrdiff_t>(row_);
        result.insert(result.end(), from, from + static_cast<std::ptrdiff_t>(row_));
      }
    }
    return results;
  }

  std::vector<float> on_cpu(std::int32_t context, std::int32_t end) const {
    cpu::Workers workers(2);
    const Layout layout = lay_out(context, end, 7);
    const std::vector<float> q = floats_of(q_);
    std::vector<float> out(static_cast<std::size_t>(end) * row_);
    const AttentionSequence sequence{context, end - context, context, 0};
    Attention op = operation(kv_.dtype(), sequence);
    op.out = out.data();
    op.q = q.data();
    op.row_dtype = DType::float32;
    op.slots[0] = layout.buffers[0].data();
    op.slots[1] = layout.buffers[1].data();
    op.slots[2] = layout.buffers[2].data();
    op.blocks = layout.table.data();
    op.sequences = &sequence;
    cpu::attention(op, workers);
    return {out.begin() + static_cast<std::ptrdiff_t>(context) * static_cast<std::ptrdiff_t>(row_),
            out.end()};
  }

  void expect_as_on_cpu(std::int32_t context, std::int32_t end, std::uint32_t placement) const {
    const std::vector<float> got = run(context, end, end - context, placement);
    const std::vector<float> want = on_cpu(context, end);
    // Weights rounded to the stored type, of values |v| < 6, and the output's own rounding (|out| < 6
    // too); then float32's: a score is a sum of head_dim products of N(0, 2)·N(0, 1) and errs by about
    // 2·√dim·dim·2⁻²⁴·scale, what it weighs by that share.
    const bool rounded = kv_.dtype() != DType::float32;
    const double tolerance = (rounded ? 12 * rounding(kv_.dtype()) : 0) +
                             6 * (16.0 * heads_.dim + 4.0 * end + 64) * 0x1p-24;
    for (std::size_t i = 0; i < want.size(); ++i) {
      ASSERT_NEAR(static_cast<double>(got[i]), static_cast<double>(want[i]), tolerance)
          << "token " << static_cast<std::size_t>(context) + i / row_ << " at " << i % row_;
    }
  }

 private:
  struct Layout {
    Stored buffers[3];
    std::vector<ContextBlock> table;
  };
  struct LayoutOnDevice {
    LayoutOnDevice(const Layout& layout, const Stored& queries)
        : buffers{StoredOnDevice(layout.buffers[0]), StoredOnDevice(layout.buffers[1]),
                  StoredOnDevice(layout.buffers[2])},
          table(layout.table),
          q(queries) {}
    void give(Attention& op) const {
      op.q = q.get();
      for (int i = 0; i < 3; ++i) {
        op.slots[i] = buffers[i].get();
      }
      op.blocks = table.get();
    }

    StoredOnDevice buffers[3];
    OnDevice<ContextBlock> table;
    StoredOnDevice q;
  };
  // For rows from `context` on.
  Layout lay_out(std::int32_t context, std::int32_t end, std::uint32_t placement) const {
    const std::int32_t blocks = (end + 15) / 16;
    std::vector<std::uint32_t> slots(static_cast<std::size_t>(2 * blocks + 3));
    std::iota(slots.begin(), slots.end(), 0u);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(placement));
    const std::size_t slot_numbers = 16 * kv_row_;
    const std::vector<float> garbage(slots.size() * slot_numbers,
                                     std::numeric_limits<float>::quiet_NaN());
    const Stored empty(kv_.dtype(), garbage);
    Layout layout{{empty, empty, empty}, {}};
    const std::int32_t seen = heads_.window == 0 ? 0 : std::max(0, context + 1 - heads_.window);
    const std::size_t first = static_cast<std::size_t>(seen / 16 * 16) * kv_row_;
    for (std::size_t b = 0; b < static_cast<std::size_t>(blocks); ++b) {
      const auto buffer = static_cast<std::uint8_t>((slots[b] + placement) % 3);
      layout.table.push_back({.slot = slots[b], .buffer = buffer, .unused = {}});
      for (std::size_t i = 0; i < slot_numbers; ++i) {
        const std::size_t from = b * slot_numbers + i;
        if (from >= first && from < static_cast<std::size_t>(end) * kv_row_) {
          layout.buffers[buffer].set(slots[b] * slot_numbers + i, kv_[from]);
        }
      }
    }
    return layout;
  }

  Attention operation(DType dtype, const AttentionSequence& sequence) const {
    return {.dtype = dtype,
            .row_dtype = dtype,
            .sequence_count = 1,
            .heads = heads_.heads,
            .kv_heads = heads_.kv_heads,
            .head_dim = heads_.dim,
            .scale = 1.0f / std::sqrt(static_cast<float>(heads_.dim)),
            .max_new_tokens = sequence.new_tokens,
            .max_context = sequence.context + sequence.new_tokens,
            .window = heads_.window};
  }

  Heads heads_;
  std::size_t row_, kv_row_;
  Stored q_;   // (tokens, heads, dim)
  Stored kv_;  // (tokens, 2, kv_heads, dim)
};

// Every width that has a kernel of its own, those between them, and those that tensor cores do not
// take.
constexpr Heads kHeads[] = {{2, 2, 32},  {3, 3, 64},  {2, 2, 80},  {2, 2, 96}, {1, 1, 128},
                            {1, 1, 160}, {1, 1, 192}, {1, 1, 256}, {2, 1, 8},  {2, 2, 40},
                            {1, 1, 104}, {1, 1, 200}, {1, 1, 1},   {3, 1, 20}, {2, 2, 33}};

TEST_F(CudaAttention, OfAPromptIsWhatTheCpuComputes) {
  for (const Heads heads : kHeads) {
    for (const DType dtype : kAllTypes) {
      for (const std::int32_t tokens : {1, 2, 16, 17, 63, 64, 65, 140}) {
        SCOPED_TRACE(testing::Message() << heads << ", " << tokens << " of " << name_of(dtype));
        Sequence(heads, tokens, dtype).expect_as_on_cpu(0, tokens, 1);
      }
    }
  }
}

TEST_F(CudaAttention, OfOneNewTokenSeesItsWholeContext) {
  for (const DType dtype : kAllTypes) {
    for (const Heads heads : {Heads{2, 2, 64}, Heads{1, 1, 128}, Heads{1, 1, 256}}) {
      for (const std::int32_t context :
           {0, 1, 15, 16, 63, 64, 127, 128, 129, 254, 255, 256, 500, 1100, 2047, 2048, 2600}) {
        SCOPED_TRACE(testing::Message() << heads << ", " << context << " of " << name_of(dtype));
        Sequence(heads, context + 1, dtype).expect_as_on_cpu(context, context + 1, 3);
      }
    }
  }
}

// Groups whose heads fill sixteen rows evenly, or not, or more than a tile of 64.
constexpr Heads kGroups[] = {{8, 2, 16},  {6, 1, 48},   {71, 1, 8},  {4, 2, 128},
                             {7, 1, 64},  {8, 1, 128},  {5, 1, 128}, {16, 1, 128},
                             {17, 1, 64}, {12, 1, 256}, {3, 1, 80}};

TEST_F(CudaAttention, SharesKeysAmongTheQueryHeadsOfAGroup) {
  for (const Heads heads : kGroups) {
    const Sequence sequence(heads, 2301, DType::float16);
    for (const auto& [context, end] : {std::pair{0, 1},
                                       {0, 2},
                                       {0, 90},
                                       {65, 66},
                                       {60, 131},
                                       {600, 601},
                                       {2300, 2301},
                                       {700, 703}}) {
      SCOPED_TRACE(testing::Message() << heads << ", " << context << " to " << end);
      sequence.expect_as_on_cpu(context, end, 2);
    }
  }
  Sequence({64, 8, 128}, 90, DType::bfloat16).expect_as_on_cpu(0, 90, 2);
  Sequence({4, 1, 33}, 90, DType::bfloat16).expect_as_on_cpu(0, 90, 2);
  Sequence({8, 2, 64}, 90, DType::float32).expect_as_on_cpu(0, 90, 2);
}

// Blocks before every row's window hold what is not a number.
TEST_F(CudaAttention, WithAWindowSeesItsLastPositionsAlone) {
  for (const DType dtype : kAllTypes) {
    for (const Heads heads : {Heads{1, 1, 64, 1}, Heads{2, 2, 32, 3}, Heads{2, 2, 80, 16},
                              Heads{8, 2, 32, 50}, Heads{8, 1, 128, 64}, Heads{4, 1, 128, 129},
                              Heads{2, 1, 96, 1000}, Heads{1, 1, 33, 70}, Heads{8, 1, 128, 300}}) {
      std::vector<std::pair<std::int32_t, std::int32_t>> parts = {{0, 1},   {0, 300},   {1, 64},
                                                                  {15, 80}, {130, 131}, {299, 300}};
      if (dtype == DType::bfloat16) {
        parts.insert(parts.end(),
                     {{600, 700}, {1029, 1030}, {1280, 1281}, {2046, 2050}, {2303, 2330}});
      }
      const Sequence sequence(heads, parts.back().second, dtype);
      for (const auto& [context, end] : parts) {
        SCOPED_TRACE(testing::Message()
                     << heads << ", " << context << " to " << end << " of " << name_of(dtype));
        sequence.expect_as_on_cpu(context, end, 4);
      }
    }
  }
}

TEST_F(CudaAttention, OfAPartWithContextIsWhatTheCpuComputes) {
  for (const DType dtype : kAllTypes) {
    for (const auto& [context, end] : {std::pair{1, 80},
                                       {63, 66},
                                       {64, 200},
                                       {250, 270},
                                       {500, 600},
                                       {700, 790},
                                       {2040, 2060}}) {
      SCOPED_TRACE(testing::Message() << context << " to " << end << " of " << name_of(dtype));
      Sequence({2, 2, 80}, end, dtype).expect_as_on_cpu(context, end, 4);
    }
  }
}

TEST_F(CudaAttention, OfScoresThatRiseIsWhatTheCpuComputes) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    for (const Heads heads : {Heads{1, 1, 128}, Heads{8, 1, 128}, Heads{3, 1, 64}, Heads{2, 2, 80},
                              Heads{4, 1, 96, 200}}) {
      SCOPED_TRACE(testing::Message() << heads << ", " << name_of(dtype));
      const Sequence sequence = Sequence(heads, 640, dtype).rising();
      sequence.expect_as_on_cpu(0, 640, 3);
      sequence.expect_as_on_cpu(639, 640, 4);
    }
  }
}

TEST_F(CudaAttentionBits, OfScoresThatRiseAreTheSameInPartsOfAnySize) {
  constexpr std::int32_t kTokens = 640;
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    for (const Heads heads : {Heads{1, 1, 128}, Heads{8, 1, 128}, Heads{7, 1, 64},
                              Heads{3, 1, 96, 200}, Heads{1, 1, 256}}) {
      const Sequence sequence = Sequence(heads, kTokens, dtype).rising();
      const std::vector<float> whole = sequence.run(0, kTokens, kTokens, 1);
      std::uint32_t placement = 2;
      for (const std::int32_t part : {1, 9, 17, 64, 200}) {
        EXPECT_TRUE(same_bits(sequence.run(0, kTokens, part, placement++), whole))
            << heads << ", " << name_of(dtype) << " in parts of " << part;
      }
    }
  }
}

TEST_F(CudaAttentionBits, AreTheSameInPartsOfAnySizeAndFromAnySlots) {
  for (const DType dtype : kAllTypes) {
    for (const Heads heads :
         {Heads{2, 2, 64}, Heads{4, 2, 80}, Heads{1, 1, 128}, Heads{2, 1, 72}, Heads{1, 1, 256},
          Heads{2, 2, 33}, Heads{8, 1, 128}, Heads{7, 1, 64}, Heads{71, 1, 8}, Heads{16, 2, 80},
          Heads{1, 1, 64, 5}, Heads{8, 1, 128, 100}, Heads{3, 1, 96, 64}, Heads{2, 2, 33, 40}}) {
      constexpr std::int32_t kTokens = 301;
      const Sequence sequence(heads, kTokens, dtype);
      const std::vector<float> whole = sequence.run(0, kTokens, kTokens, 1);
      std::uint32_t placement = 2;
      for (const std::int32_t part : {1, 2, 15, 16, 17, 33, 64, 65, 128, 200}) {
        EXPECT_TRUE(same_bits(sequence.run(0, kTokens, part, placement++), whole))
            << heads << ", " << name_of(dtype) << " in parts of " << part;
      }
    }
  }
}

TEST_F(CudaAttentionBits, OfALateTokenAreTheSameAloneAndInItsPrompt) {
  constexpr std::int32_t kTokens = 1100;
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    const Sequence sequence({1, 1, 128}, kTokens, dtype, 5);
    const std::vector<float> prompt = sequence.run(1000, kTokens, 100, 1);
    for (const std::int32_t token : {1000, 1023, 1024, 1025, 1087, 1088, 1099}) {
      const std::vector<float> alone = sequence.run(token, token + 1, 1, 6);
      const auto from = prompt.begin() + (token - 1000) * 128;
      EXPECT_TRUE(same_bits(alone, std::vector<float>(from, from + 128))) << token;
    }
  }
}

TEST_F(CudaAttentionBits, AreTheSameInPartsAcrossManyChunks) {
  constexpr std::int32_t kTokens = 2350;  // nine chunks of 256 positions, and a part of a tenth
  for (const auto& [heads, dtype] : {std::pair{Heads{2, 1, 128}, DType::float16},
                                     {Heads{1, 1, 80}, DType::bfloat16},
                                     {Heads{8, 1, 128}, DType::bfloat16},
                                     {Heads{1, 1, 128, 600}, DType::float16},
                                     {Heads{5, 1, 64, 1100}, DType::bfloat16},
                                     {Heads{2, 1, 96, 2047}, DType::float16}}) {
    const Sequence sequence(heads, kTokens, dtype, 9);
    const std::vector<float> whole = sequence.run(0, kTokens, kTokens, 1);
    std::uint32_t placement = 2;
    for (const std::int32_t part : {1, 16, 17, 100}) {
      EXPECT_TRUE(same_bits(sequence.run(0, kTokens, part, placement++), whole))
          << heads << ", " << name_of(dtype) << " in parts of " << part;
    }
  }
}

TEST_F(CudaAttentionBits, OfAQueryHeadAreTheSameAloneAndInItsGroup) {
  constexpr std::int32_t kTokens = 1300;
  for (const Heads heads : {Heads{8, 1, 128}, Heads{7, 1, 64}, Heads{20, 1, 80}, Heads{2, 1, 256},
                            Heads{8, 1, 128, 500}, Heads{4, 1, 33}}) {
    for (const DType dtype : {DType::float16, DType::bfloat16}) {
      const Sequence group(heads, kTokens, dtype, 21);
      for (const auto& [context, end] : {std::pair{1299, 1300}, {1290, 1300}, {0, 140}}) {
        const std::vector<float> together = group.run(context, end, end - context, 1);
        for (const std::int32_t head : {0, 1, heads.heads - 1}) {
          EXPECT_TRUE(same_bits(group.of_head(head).run(context, end, end - context, 2),
                                group.numbers_of_head(together, head)))
              << heads << ", " << name_of(dtype) << ": head " << head << " from " << context;
        }
      }
    }
  }
}

// Short enough for compute-sanitizer (bench/gpu_sections.py names it).
TEST_F(CudaAttentionBits, OfAFewRowsThatBlocksShare) {
  for (const Heads heads : {Heads{2, 1, 64}, Heads{8, 1, 128, 700}}) {
    const Sequence sequence(heads, 1100, DType::float16, 12);
    const auto got = sequence.decode({1099, 40, 300}, {1, 512, 1100}, 3);
    for (const std::vector<float>& one : got) {
      EXPECT_TRUE(same_bits(one, got.front()));
    }
  }
}

TEST_F(CudaAttentionBits, OfADecodingRowDoNotDependOnHowManyBlocksShareIt) {
  constexpr std::int32_t kTokens = 2350;
  // Chunks' borders, and rows of less context than a launch has blocks for.
  const std::vector<std::int32_t> tokens = {2349, 0,    1,    63,   64,   254,  255,  256,
                                            257,  511,  512,  767,  768,  1023, 1024, 1279,
                                            1280, 1791, 1792, 2047, 2048, 2049, 2303, 2304};
  // Enough for clusters of one, two, four and eight blocks, and less than some rows have.
  const std::vector<std::int32_t> max_contexts = {1, 512, 1024, 2048, kTokens};
  std::vector<Heads> all = {{8, 1, 128},      {7, 1, 64},   {16, 1, 128},     {16, 1, 80},
                            {9, 1, 256},      {12, 1, 192}, {1, 1, 128, 300}, {8, 1, 128, 1500},
                            {8, 1, 96, 2100}, {3, 1, 64, 1}};
  for (const std::int32_t dim : {32, 64, 72, 80, 96, 128, 160, 192, 256}) {
    all.push_back({1, 1, dim});
  }
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    for (const Heads heads : all) {
      if (dtype == DType::float16 && heads.heads * heads.dim > 1024) {
        continue;  // in one type
      }
      const Sequence sequence(heads, kTokens, dtype, 11);
      const std::vector<float> prompt = sequence.run(0, kTokens, kTokens, 1);
      const std::ptrdiff_t row = heads.heads * heads.dim;
      std::vector<float> want;
      for (const std::int32_t token : tokens) {
        const auto from = prompt.begin() + token * row;
        want.insert(want.end(), from, from + row);
      }
      const auto got = sequence.decode(tokens, max_contexts, 5);
      for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_TRUE(same_bits(got[i], want))
            << heads << ", " << name_of(dtype) << ", told a context of " << max_contexts[i];
      }
    }
  }
}

// Parts of up to 64 rows, as decoding ones, pass through another kernel than whole prompts where the
// GPU has one for these; contexts long enough for each slice to come twice.
TEST_F(CudaAttentionBits, OfLongPromptsAreThoseOfShortParts) {
  constexpr std::int32_t kTokens = 2500;
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    for (const Heads heads : {Heads{4, 1, 128}, Heads{1, 1, 64}, Heads{3, 1, 80, 700},
                              Heads{8, 1, 128, 300}, Heads{2, 1, 40}, Heads{64, 64, 64}}) {
      if (heads.kv_heads > 1 && dtype == DType::bfloat16) {
        continue;  // in one type: so many places that each block takes ten
      }
      const Sequence sequence(heads, kTokens, dtype);
      const std::vector<float> whole = sequence.run(0, kTokens, kTokens, 1);
      const std::int32_t few = 64 / (heads.heads / heads.kv_heads);
      std::uint32_t placement = 2;
      for (const std::int32_t part : {few, 1000}) {
        EXPECT_TRUE(same_bits(sequence.run(0, kTokens, part, placement++), whole))
            << heads << ", " << name_of(dtype) << " in parts of " << part;
      }
    }
  }
}

TEST_F(CudaAttention, OfPromptsOfAnyShapeIsWhatTheCpuComputes) {
  std::mt19937 random(20);
  const auto below = [&](std::int32_t end) {
    return static_cast<std::int32_t>(random() % static_cast<unsigned>(end));
  };
  for (int round = 0; round < 40; ++round) {
    const std::int32_t group = 1 + below(8);
    const std::int32_t kv_heads = 1 + below(2);
    const Heads heads{group * kv_heads, kv_heads, 8 * (4 + below(13)),
                      below(3) == 0 ? 1 + below(600) : 0};
    const std::int32_t context = below(2) == 0 ? 0 : below(1500);
    const std::int32_t end = context + 1 + below(500);
    const DType dtype = round % 2 == 0 ? DType::float16 : DType::bfloat16;
    SCOPED_TRACE(testing::Message()
                 << heads << ", " << context << " to " << end << " of " << name_of(dtype));
    Sequence(heads, end, dtype, static_cast<std::uint32_t>(round))
        .expect_as_on_cpu(context, end, 5);
  }
}

TEST_F(CudaAttentionBits, OfASequenceDoNotDependOnTheOnesBesideIt) {
  constexpr std::int32_t kDim = 64;
  constexpr std::size_t kRow = 2 * kDim;
  // Sequences of many lengths, each in blocks of its own, new tokens last.
  const std::vector<std::pair<std::int32_t, std::int32_t>> context_and_new = {
      {0, 1},   {33, 1},  {0, 70},   {128, 5},  {15, 1},   {140, 0}, {16, 16},
      {200, 1}, {255, 1}, {600, 20}, {2500, 1}, {230, 40}, {1030, 1}};
  std::vector<ContextBlock> blocks;
  std::vector<AttentionSequence> sequences;
  std::int32_t rows = 0;
  for (const auto& [context, fresh] : context_and_new) {
    sequences.push_back({rows, fresh, context, static_cast<std::int32_t>(blocks.size())});
    for (std::int32_t b = 0; b < (context + fresh + 15) / 16; ++b) {
      blocks.push_back(
          {.slot = static_cast<std::uint32_t>(blocks.size()), .buffer = 0, .unused = {}});
    }
    rows += fresh;
  }
  for (const DType dtype : kAllTypes) {
    const std::size_t numbers = static_cast<std::size_t>(rows) * kRow;
    const StoredOnDevice q(Stored(dtype, normal_values(1, numbers)));
    const StoredOnDevice slots(Stored(dtype, normal_values(2, blocks.size() * 16 * 2 * kRow)));
    const OnDevice<ContextBlock> table(blocks);
    const OnDevice<AttentionSequence> all(sequences);
    const Stored nothing(dtype, std::vector<float>(numbers, -7));
    const auto attend = [&](const StoredOnDevice& out, std::size_t first, std::int32_t count,
                            std::int32_t longest, std::int32_t max_context) {
      cuda::attention({.out = out.get(),
                       .q = q.get(),
                       .slots = {slots.get(), nullptr, nullptr},
                       .dtype = dtype,
                       .row_dtype = dtype,
                       .blocks = table.get(),
                       .sequences = all.get() + first,
                       .sequence_count = count,
                       .heads = 2,
                       .kv_heads = 2,
                       .head_dim = kDim,
                       .scale = 0.2f,
                       .max_new_tokens = longest,
                       .max_context = max_context},
                      nullptr);
    };
    const StoredOnDevice together(nothing);
    attend(together, 0, static_cast<std::int32_t>(sequences.size()), 70, 2501);
    const StoredOnDevice apart(nothing);
    for (std::size_t s = 0; s < sequences.size(); ++s) {
      attend(apart, s, 1, sequences[s].new_tokens, sequences[s].context + sequences[s].new_tokens);
    }
    EXPECT_TRUE(together.read() == apart.read()) << name_of(dtype);
  }
}

TEST_F(CudaAttention, OfThousandsOfSequencesServesThemAll) {
  // All of one block; values are their position, queries nought: each row is the mean of what it sees.
  constexpr std::int32_t kSequences = 2500;
  constexpr std::int32_t kDim = 64;
  std::vector<float> slot(16 * 2 * kDim, 0.0f);
  for (std::size_t i = 0; i < slot.size(); ++i) {
    slot[i] = i / kDim % 2 == 1 ? static_cast<float>(i / (2 * kDim)) : 1.0f;
  }
  std::vector<AttentionSequence> sequences;
  for (std::int32_t s = 0; s < kSequences; ++s) {
    sequences.push_back({s, 1, s % 16, 0});
  }
  for (const DType dtype : kAllTypes) {
    const StoredOnDevice q(Stored(dtype, std::vector<float>(kSequences * kDim, 0.0f)));
    const StoredOnDevice out(Stored(dtype, std::vector<float>(kSequences * kDim, -7)));
    const StoredOnDevice slots(Stored(dtype, slot));
    const OnDevice<ContextBlock> table(std::vector<ContextBlock>(1));
    const OnDevice<AttentionSequence> all(sequences);
    cuda::attention({.out = out.get(),
                     .q = q.get(),
                     .slots = {slots.get(), nullptr, nullptr},
                     .dtype = dtype,
                     .row_dtype = dtype,
                     .blocks = table.get(),
                     .sequences = all.get(),
                     .sequence_count = kSequences,
                     .heads = 1,
                     .kv_heads = 1,
                     .head_dim = kDim,
                     .scale = 1,
                     .max_new_tokens = 1,
                     .max_context = 16},
                    nullptr);
    const Stored means = out.read();
    for (std::size_t i = 0; i < means.size(); ++i) {
      const double mean = static_cast<double>(i / kDim % 16) / 2;
      ASSERT_NEAR(static_cast<double>(means[i]), mean, mean * 2 * rounding(dtype) + 1e-6) << i;
    }
  }
}

TEST_F(CudaAttention, OfNothingLaunchesNothing) {
  cuda::attention({.sequence_count = 0, .heads = 2, .kv_heads = 2, .head_dim = 64}, nullptr);
  cuda::cuda_check(cudaDeviceSynchronize(), "nothing");
}

TEST_F(CudaAttention, ChecksItsShapes) {
  Attention op{.dtype = DType::float16,
               .row_dtype = DType::float16,
               .sequence_count = 1,
               .heads = 3,
               .kv_heads = 2,
               .head_dim = 64,
               .max_new_tokens = 1};
  EXPECT_ANY_THROW(cuda::attention(op, nullptr));
  op.heads = 4;
  op.head_dim = 264;
  EXPECT_ANY_THROW(cuda::attention(op, nullptr));
  op.head_dim = 64;
  op.row_dtype = DType::float32;
  EXPECT_ANY_THROW(cuda::attention(op, nullptr));
}

}  // namespace
}  // namespace poise::test
