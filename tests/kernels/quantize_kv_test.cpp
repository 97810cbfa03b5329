#include <gtest/gtest.h>

#include <numeric>
#include <utility>

#include "tests/kernels/kv_reference.h"

namespace poise::test {
namespace {

constexpr KvFormat kQuantized[] = {KvFormat::int8, KvFormat::int4};

std::vector<std::byte> quantized(const Stored& kv, std::size_t rows, const KvShape& shape,
                                 cpu::Workers& workers) {
  std::vector<std::byte> out(rows * static_cast<std::size_t>(shape.layout().row), std::byte{0xee});
  cpu::quantize_kv({.out = out.data(),
                    .in = kv.data(),
                    .dtype = shape.dtype,
                    .format = shape.format,
                    .rows = static_cast<std::int64_t>(rows),
                    .kv_heads = shape.kv_heads,
                    .head_dim = shape.head_dim},
                   workers);
  return out;
}

template <typename Fn>
void for_each_kind(Fn fn) {
  for (const DType dtype : kAllTypes) {
    for (const KvFormat format : kQuantized) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " as " << name_of(format));
      fn(dtype, format);
    }
  }
}

TEST(QuantizeKv, FollowsItsDefinitionToTheBitOnEveryInstructionSet) {
  cpu::Workers workers(2);
  for_each_kind([&](DType dtype, KvFormat format) {
    for (const auto& [heads, dim] :
         {std::pair{1, 1}, {3, 5}, {2, 16}, {2, 63}, {12, 64}, {1, 65}, {2, 80}, {1, 255}}) {
      const KvShape shape{heads, dim, dtype, format};
      constexpr std::size_t kRows = 16;
      const Stored kv = varied_kv(kRows, shape, static_cast<std::uint32_t>(dim));
      std::vector<std::byte> expected;
      for (std::size_t row = 0; row < kRows; ++row) {
        const auto one = quantized_row(kv, row, shape);
        expected.insert(expected.end(), one.begin(), one.end());
      }
      for (const cpu::Isa isa : cpu::available_isas()) {
        under(isa, [&] {
          EXPECT_EQ(quantized(kv, kRows, shape, workers), expected)
              << heads << " heads of " << dim << ", " << cpu::name_of(isa);
        });
      }
    }
  });
}

TEST(QuantizeKv, KeepsEachNumberWithinHalfAScaleAndTheLeastOneExactly) {
  cpu::Workers workers(1);
  for_each_kind([&](DType dtype, KvFormat format) {
    const KvShape shape{2, 64, dtype, format};
    constexpr std::size_t kRows = 20;
    const Stored kv(dtype, normal_values(7, kRows * shape.numbers(), 3));
    const auto rows = quantized(kv, kRows, shape, workers);
    for (std::size_t first = 0; first < kv.size(); first += kKvGroup) {
      const std::size_t row = first / shape.numbers();
      const Stored numbers =
          numbers_of(rows.data() + row * static_cast<std::size_t>(shape.layout().row), shape);
      float least = kv[first], most = kv[first];
      for (std::size_t i = first; i < first + kKvGroup; ++i) {
        least = std::min(least, kv[i]);
        most = std::max(most, kv[i]);
      }
      const double half = static_cast<double>(most - least) / kv_levels(format) / 2;
      for (std::size_t i = first; i < first + kKvGroup; ++i) {
        const double number = static_cast<double>(numbers[i - row * shape.numbers()]);
        // The scale is rounded up, and the number rounded, in the type.
        const double bound = half * (1 + 2 * rounding(dtype)) + rounding(dtype) * std::abs(number);
        ASSERT_LE(std::abs(number - static_cast<double>(kv[i])), bound * 1.0001);
        if (kv[i] == least) {
          ASSERT_EQ(number, static_cast<double>(least));
        }
      }
    }
  });
}

// One sequence in blocks over three buffers, quantised and as the numbers that they stand for.
class BothWays {
 public:
  BothWays(const KvShape& shape, std::int32_t group, std::int32_t tokens, std::int32_t window)
      : shape_(shape), group_(group), tokens_(tokens), window_(window) {
    const auto row = static_cast<std::size_t>(shape.layout().row);
    const Stored kv(shape.dtype,
                    normal_values(3, static_cast<std::size_t>(tokens) * shape.numbers()));
    const std::size_t blocks = static_cast<std::size_t>(tokens + 15) / 16;
    std::vector<std::uint32_t> slots(blocks);
    std::iota(slots.begin(), slots.end(), 0u);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(5));
    for (auto& buffer : quantized_) {
      buffer.resize(blocks * 16 * row, std::byte{0xff});  // not a number, or some code
    }
    for (Stored& buffer : plain_) {
      buffer = Stored(shape.dtype, std::vector<float>(blocks * 16 * shape.numbers(),
                                                      std::numeric_limits<float>::quiet_NaN()));
    }
    for (std::size_t b = 0; b < blocks; ++b) {
      table_.push_back({.slot = slots[b], .buffer = static_cast<std::uint8_t>(slots[b] % 3)});
    }
    for (std::size_t t = 0; t < static_cast<std::size_t>(tokens); ++t) {
      const ContextBlock& at = table_[t / 16];
      const std::size_t place = at.slot * 16 + t % 16;
      const auto bytes = quantized_row(kv, t, shape);
      std::ranges::copy(bytes,
                        quantized_[at.buffer].begin() + static_cast<std::ptrdiff_t>(place * row));
      const Stored numbers = numbers_of(bytes.data(), shape);
      for (std::size_t i = 0; i < shape.numbers(); ++i) {
        plain_[at.buffer].set(place * shape.numbers() + i, numbers[i]);
      }
    }
    q_ = normal_values(9, static_cast<std::size_t>(tokens) * q_row(), 2);
  }

  std::vector<float> run(KvFormat format, std::int32_t context, std::int32_t part,
                         cpu::Workers& workers) const {
    std::vector<float> out(static_cast<std::size_t>(tokens_ - context) * q_row());
    for (std::int32_t at = context; at < tokens_; at += part) {
      const AttentionSequence sequence{.first_row = at - context,
                                       .new_tokens = std::min(part, tokens_ - at),
                                       .context = at,
                                       .first_block = 0};
      Attention op{.out = out.data(),
                   .q = q_.data() + static_cast<std::size_t>(context) * q_row(),
                   .slots = {plain_[0].data(), plain_[1].data(), plain_[2].data()},
                   .dtype = shape_.dtype,
                   .format = format,
                   .blocks = table_.data(),
                   .sequences = &sequence,
                   .sequence_count = 1,
                   .heads = shape_.kv_heads * group_,
                   .kv_heads = shape_.kv_heads,
                   .head_dim = shape_.head_dim,
                   .scale = 0.1f,
                   .window = window_};
      if (format != KvFormat::plain) {
        for (std::size_t i = 0; i < 3; ++i) {
          op.slots[i] = quantized_[i].data();
        }
      }
      cpu::attention(op, workers);
    }
    return out;
  }

 private:
  std::size_t q_row() const {
    return static_cast<std::size_t>(shape_.kv_heads * group_ * shape_.head_dim);
  }

  KvShape shape_;
  std::int32_t group_, tokens_, window_;
  std::vector<ContextBlock> table_;
  std::vector<std::byte> quantized_[3];
  Stored plain_[3] = {Stored(DType::float32, 0), Stored(DType::float32, 0),
                      Stored(DType::float32, 0)};
  std::vector<float> q_;
};

TEST(QuantizeKv, AttentionOverCodesHasTheBitsOfAttentionOverTheirNumbers) {
  cpu::Workers workers(2);
  struct Case {
    std::int32_t kv_heads, head_dim, group, window;
  };
  // Each kind takes two of the shapes, and each shape is of two kinds.
  const Case cases[] = {{2, 64, 1, 0},  {1, 80, 4, 0},  {2, 5, 1, 0},
                        {4, 16, 1, 20}, {1, 65, 2, 50}, {2, 128, 2, 0}};
  std::size_t kind = 0;
  for_each_kind([&](DType dtype, KvFormat format) {
    for (const Case& c : {cases[kind], cases[(kind + 2) % 6]}) {
      SCOPED_TRACE(testing::Message() << c.kv_heads << " heads of " << c.head_dim);
      const BothWays both({c.kv_heads, c.head_dim, dtype, format}, c.group, 150, c.window);
      const std::vector<float> expected = both.run(KvFormat::plain, 0, 150, workers);
      EXPECT_TRUE(same_bits(both.run(format, 0, 150, workers), expected));
      EXPECT_TRUE(same_bits(both.run(format, 0, 37, workers), expected)) << "in parts";
      const std::vector<float> last = both.run(KvFormat::plain, 149, 1, workers);
      for (const cpu::Isa isa : cpu::available_isas()) {
        under(isa, [&] { EXPECT_TRUE(same_bits(both.run(format, 149, 1, workers), last)); });
      }
    }
    ++kind;
  });
}

}  // namespace
}  // namespace poise::test
