#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <span>

#include "kernels/host/host_attention.h"
#include "tests/kernels/exact_attention.h"
#include "tests/kernels/kv_reference.h"

namespace poise::test {
namespace {

struct CodesShape {
  std::int32_t heads, kv_heads, dim;
  std::int32_t window = 0;
  std::int32_t new_tokens = 1;
};
// Contexts of a row's first token: within a block, at its end, of several chunks.
constexpr std::int32_t kContexts[] = {0, 15, 16, 127, 290};

// Sequences whose keys and values lie in rows of codes. Rows of positions that no sequence has are not numbers.
class CodesCase {
 public:
  CodesCase(CodesShape shape, DType dtype, KvFormat format, std::uint32_t seed)
      : shape_(shape), kv_shape_{shape.kv_heads, shape.dim, dtype, format} {
    std::int32_t blocks = 0, rows = 0;
    for (const std::int32_t context : kContexts) {
      sequences_.push_back({rows, shape.new_tokens, context, blocks});
      blocks += ceil_div(context + shape.new_tokens, kBlockTokens);
      rows += shape.new_tokens;
    }
    for (std::int32_t b = 0; b < blocks; ++b) {
      blocks_.push_back({.slot = static_cast<std::uint32_t>(blocks - 1 - b)});
    }
    q_ = normal_values(seed, static_cast<std::size_t>(rows * shape.heads * shape.dim), 2);
    const KvRowLayout layout = kv_shape_.layout();
    cpu::Workers worker(1);
    bytes_.assign(static_cast<std::size_t>(layout.row * blocks * kBlockTokens), std::byte{0xff});
    for (const AttentionSequence& one : sequences_) {
      const auto tokens = static_cast<std::size_t>(one.context + one.new_tokens);
      Stored kv(dtype, normal_values(++seed, tokens * kv_shape_.numbers()));
      spoil_unseen(one, kv);
      for (std::size_t t = 0; t < tokens; t += kBlockTokens) {  // a block's rows lie together
        const std::size_t rows = std::min<std::size_t>(tokens - t, kBlockTokens);
        cpu::quantize_kv({.out = row_at(one, static_cast<std::int32_t>(t)),
                          .in = static_cast<const std::byte*>(kv.data()) + t * 2 * kv_shape_.numbers(),
                          .dtype = dtype,
                          .format = format,
                          .rows = static_cast<std::int64_t>(rows),
                          .kv_heads = shape.kv_heads,
                          .head_dim = shape.dim},
                         worker);
      }
    }
  }

  void round_queries(DType dtype) {
    const Stored rounded(dtype, q_);
    for (std::size_t i = 0; i < q_.size(); ++i) {
      q_[i] = rounded[i];
    }
  }

  // Each row becomes a sequence of its own, over the same blocks.
  void part_rows() {
    std::vector<AttentionSequence> rows;
    for (const AttentionSequence& one : sequences_) {
      for (std::int32_t token = 0; token < one.new_tokens; ++token) {
        rows.push_back({one.first_row + token, 1, one.context + token, one.first_block});
      }
    }
    sequences_ = rows;
  }

  std::vector<float> run(cpu::Workers& workers, bool from_codes = true) const {
    std::vector<float> out(q_.size(), -7);
    const Attention op = this->op(out.data(), q_.data(), DType::float32);
    (from_codes ? cpu::attention_from_codes : cpu::attention)(op, workers);
    return out;
  }

  // By host cores, with rows of `rows_type`.
  Stored run_on_host(DType rows_type, cpu::Workers& workers) const {
    const Stored q(rows_type, q_);
    Stored out(rows_type, q_.size());
    host::host_attention({.rows = {.out = nullptr, .in = nullptr, .moves = nullptr, .row_bytes = 0},
                          .attention = op(out.data(), q.data(), rows_type),
                          .bytes = 0},
                         workers);
    return out;
  }

  // Float64's attention over code · scale + offset, rounded nowhere.
  std::vector<double> exact() const {
    std::vector<double> out;
    for (const AttentionSequence& one : sequences_) {
      const std::vector<double> kv = numbers(one);
      for (std::int32_t token = 0; token < one.new_tokens; ++token) {
        for (std::int32_t head = 0; head < shape_.heads; ++head) {
          const auto at = static_cast<std::size_t>(
              ((one.first_row + token) * shape_.heads + head) * shape_.dim);
          const std::vector<double> row =
              exact_row(kv.data(), one.context + token, head / (shape_.heads / shape_.kv_heads),
                        &q_[at]);
          out.insert(out.end(), row.begin(), row.end());
        }
      }
    }
    return out;
  }

 private:
  Attention op(void* out, const void* q, DType rows_type) const {
    return {.out = out,
            .q = q,
            .slots = {bytes_.data(), nullptr, nullptr},
            .dtype = kv_shape_.dtype,
            .format = kv_shape_.format,
            .row_dtype = rows_type,
            .blocks = blocks_.data(),
            .sequences = sequences_.data(),
            .sequence_count = static_cast<std::int32_t>(sequences_.size()),
            .heads = shape_.heads,
            .kv_heads = shape_.kv_heads,
            .head_dim = shape_.dim,
            .scale = scale(),
            .window = shape_.window};
  }

  float scale() const { return 1.0f / std::sqrt(static_cast<float>(shape_.dim)); }

  // What no row sees, before the first row's window, is infinite; and what the last row alone sees is, where there are more.
  void spoil_unseen(const AttentionSequence& one, Stored& kv) const {
    const std::int32_t seen_from =
        shape_.window == 0 ? 0 : std::max(0, one.context + 1 - shape_.window);
    for (std::int32_t t = 0; t < one.context + one.new_tokens; ++t) {
      const bool last_of_many = one.new_tokens > 1 && t == one.context + one.new_tokens - 1;
      for (std::size_t d = 0; (t < seen_from || last_of_many) && d < kv_shape_.numbers(); ++d) {
        kv.set(static_cast<std::size_t>(t) * kv_shape_.numbers() + d,
               std::numeric_limits<float>::infinity());
      }
    }
  }

  std::byte* row_at(const AttentionSequence& one, std::int32_t t) {
    return bytes_.data() + offset_of(one, t);
  }
  std::int64_t offset_of(const AttentionSequence& one, std::int32_t t) const {
    const ContextBlock& block =
        blocks_[static_cast<std::size_t>(one.first_block + t / kBlockTokens)];
    const std::int64_t row = std::int64_t{block.slot} * kBlockTokens + t % kBlockTokens;
    return row * kv_shape_.layout().row;
  }

  // What a sequence's codes stand for: (tokens, 2, kv_heads, dim).
  std::vector<double> numbers(const AttentionSequence& one) const {
    const KvRowLayout layout = kv_shape_.layout();
    std::vector<double> out;
    for (std::int32_t t = 0; t < one.context + one.new_tokens; ++t) {
      const std::byte* const row = bytes_.data() + offset_of(one, t);
      for (std::int32_t head = 0; head < 2 * shape_.kv_heads; ++head) {
        const std::byte* const codes = row + head * layout.codes;
        Stored group(kv_shape_.dtype, 2);
        for (std::int32_t d = 0; d < shape_.dim; ++d) {
          if (d % kKvGroup == 0) {
            std::memcpy(group.data(),
                        row + layout.groups_at + (head * layout.groups + d / kKvGroup) * 4, 4);
          }
          const bool bytes = kv_shape_.format == KvFormat::int8;
          const int code = bytes ? static_cast<int>(codes[d])
                                 : static_cast<int>(codes[d / 2]) >> (d % 2 * 4) & 15;
          out.push_back(code * static_cast<double>(group[0]) + static_cast<double>(group[1]));
        }
      }
    }
    return out;
  }

  std::vector<double> exact_row(const double* kv, std::int32_t position, std::int32_t kv_head,
                                const float* query) const {
    const std::int32_t first = shape_.window == 0 ? 0 : std::max(0, position + 1 - shape_.window);
    const std::int32_t dim = shape_.dim;
    const auto stored = [&](std::int32_t t, std::int32_t which) {
      return kv + ((t * 2 + which) * shape_.kv_heads + kv_head) * dim;
    };
    return exact_attention(query, first, position, dim, scale(), stored);
  }

  CodesShape shape_;
  KvShape kv_shape_;
  std::vector<AttentionSequence> sequences_;
  std::vector<ContextBlock> blocks_;
  std::vector<float> q_;
  std::vector<std::byte> bytes_;
};

template <typename Fn>
void for_each_coding(Fn fn) {
  for (const DType dtype : {DType::float16, DType::bfloat16}) {
    for (const KvFormat format : {KvFormat::int8, KvFormat::int4}) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " as " << name_of(format));
      fn(dtype, format);
    }
  }
}

// One query head to a key, and several; windows; new tokens, also more than a slice takes; a last group of 32 numbers; many
// key heads.
constexpr CodesShape kShapes[] = {{8, 2, 128},         {3, 3, 96, 0, 2},  {2, 1, 256, 40},
                                  {70, 70, 32, 0, 1},  {7, 1, 32},        {5, 5, 64, 20, 3},
                                  {16, 1, 64, 133, 1}, {2, 1, 32, 60, 37}};

TEST(AttentionFromCodes, IsFloat64sOverWhatCodesStandForWithTheSameBitsEverywhere) {
  cpu::Workers one_worker(1), workers(3);
  for_each_coding([&](DType dtype, KvFormat format) {
    // The type of scales and offsets matters where they are read alone.
    const std::span<const CodesShape> shapes(kShapes);
    for (const CodesShape& shape : dtype == DType::float16 ? shapes : shapes.first(2)) {
      SCOPED_TRACE(testing::Message() << shape.heads << " heads of " << shape.dim);
      const CodesCase one(shape, dtype, format, 3);
      const std::vector<float> out = one.run(workers);
      const std::vector<double> expected = one.exact();
      ASSERT_EQ(out.size(), expected.size());
      for (std::size_t i = 0; i < out.size(); ++i) {
        // Rounding to 16 bits alone would be 5e-4 and more.
        if (std::isnan(expected[i])) {
          ASSERT_TRUE(std::isnan(out[i])) << i;
        } else {
          ASSERT_NEAR(static_cast<double>(out[i]), expected[i], 1e-5) << i;
        }
      }
      for (const cpu::Isa isa : cpu::available_isas()) {
        under(isa, [&] {
          EXPECT_TRUE(same_bits(one.run(one_worker), out)) << cpu::name_of(isa);
        });
      }
    }
  });
}

// Heads of no whole pairs of sixteen, or with many query heads to a key, are attended as on the CPU device.
TEST(AttentionFromCodes, LeavesOtherShapesToAttention) {
  cpu::Workers workers(2);
  for_each_coding([&](DType dtype, KvFormat format) {
    for (const CodesShape& shape : {CodesShape{2, 2, 80}, {17, 1, 32}}) {
      const CodesCase one(shape, dtype, format, 4);
      EXPECT_TRUE(same_bits(one.run(workers), one.run(workers, false))) << shape.dim;
    }
  });
}

// A row has the same bits alone, with the rows before it as context.
TEST(AttentionFromCodes, OfARowDoesNotDependOnTheRowsBesideIt) {
  cpu::Workers workers(2);
  for_each_coding([&](DType dtype, KvFormat format) {
    CodesCase one({6, 2, 64, 30, 35}, dtype, format, 6);
    const std::vector<float> together = one.run(workers);
    one.part_rows();
    EXPECT_TRUE(same_bits(one.run(workers), together));
  });
}

// A GPU's rows are attended from codes and rounded once; those of the CPU device with the bits that it has elsewhere.
TEST(AttentionFromCodes, IsWhatHostCoresDoBesideAGpu) {
  cpu::Workers workers(2);
  for_each_coding([&](DType dtype, KvFormat format) {
    CodesCase one({4, 2, 64}, dtype, format, 5);
    one.round_queries(dtype);
    const Stored expected(dtype, one.run(workers));
    const Stored out = one.run_on_host(dtype, workers);
    const Stored wide = one.run_on_host(DType::float32, workers);
    const std::vector<float> attended = one.run(workers, false);
    for (std::size_t i = 0; i < out.size(); ++i) {
      ASSERT_EQ(out[i], expected[i]) << i;
      ASSERT_EQ(wide[i], attended[i]) << i;
    }
  });
}

}  // namespace
}  // namespace poise::test
