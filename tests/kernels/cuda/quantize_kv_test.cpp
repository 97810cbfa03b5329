// Quantised keys and values on the GPU: the CPU's codes, and attention over them with the bits of attention
// over the numbers that they stand for.
#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include "tests/kernels/cuda/on_device.h"
#include "tests/kernels/kv_reference.h"

namespace poise::test {
namespace {

class CudaQuantizeKv : public CudaTest {};

constexpr KvFormat kFormats[] = {KvFormat::int8, KvFormat::int4};

TEST_F(CudaQuantizeKv, GivesTheBitsOfTheDefinition) {
  constexpr std::size_t kRows = 40;
  for (const DType dtype : kAllTypes) {
    for (const KvFormat format : kFormats) {
      for (const auto& [heads, dim] :
           {std::pair{1, 1}, {3, 5}, {2, 63}, {12, 64}, {1, 65}, {8, 128}, {1, 255}}) {
        const KvShape shape{heads, dim, dtype, format};
        const Stored kv = varied_kv(kRows, shape, static_cast<std::uint32_t>(dim));
        std::vector<std::byte> expected;
        for (std::size_t row = 0; row < kRows; ++row) {
          const auto one = quantized_row(kv, row, shape);
          expected.insert(expected.end(), one.begin(), one.end());
        }
        const StoredOnDevice in(kv);
        const OnDevice<std::byte> out(std::vector<std::byte>(expected.size(), std::byte{0xee}));
        cuda::quantize_kv({.out = out.get(),
                           .in = in.get(),
                           .dtype = dtype,
                           .format = format,
                           .rows = kRows,
                           .kv_heads = heads,
                           .head_dim = dim},
                          nullptr);
        EXPECT_TRUE(out.read() == expected)
            << name_of(dtype) << " as " << name_of(format) << ", " << heads << " heads of " << dim;
      }
    }
  }
}

struct Case {
  std::int32_t kv_heads, head_dim, group, window, tokens;
};

// One sequence whose blocks lie in two buffers and whose last block is followed by what is not a number.
class OneSequence {
 public:
  OneSequence(const KvShape& shape, const Case& c)
      : shape_(shape),
        case_(c),
        q_(shape.dtype, normal_values(9, static_cast<std::size_t>(c.tokens) * q_row(), 2)) {
    const auto row = static_cast<std::size_t>(shape.layout().row);
    const std::size_t blocks = static_cast<std::size_t>(c.tokens + 15) / 16;
    const Stored kv(shape.dtype,
                    normal_values(3, static_cast<std::size_t>(c.tokens) * shape.numbers()));
    std::vector<std::uint32_t> slots(blocks);
    std::iota(slots.begin(), slots.end(), 0u);
    std::shuffle(slots.begin(), slots.end(), std::mt19937(5));
    for (std::size_t buffer = 0; buffer < 2; ++buffer) {
      codes_[buffer].resize(blocks * 16 * row, std::byte{0xff});
      numbers_[buffer] =
          Stored(shape.dtype, std::vector<float>(blocks * 16 * shape.numbers(),
                                                 std::numeric_limits<float>::quiet_NaN()));
    }
    for (std::size_t b = 0; b < blocks; ++b) {
      table_.push_back({.slot = slots[b], .buffer = static_cast<std::uint8_t>(slots[b] % 2)});
    }
    for (std::size_t t = 0; t < static_cast<std::size_t>(c.tokens); ++t) {
      const ContextBlock& at = table_[t / 16];
      const std::size_t place = at.slot * 16 + t % 16;
      const auto bytes = quantized_row(kv, t, shape);
      std::ranges::copy(bytes,
                        codes_[at.buffer].begin() + static_cast<std::ptrdiff_t>(place * row));
      const Stored numbers = numbers_of(bytes.data(), shape);
      for (std::size_t i = 0; i < shape.numbers(); ++i) {
        numbers_[at.buffer].set(place * shape.numbers() + i, numbers[i]);
      }
    }
  }

  std::vector<float> attend(KvFormat format, std::int32_t context) const {
    const bool plain = format == KvFormat::plain;
    const std::size_t bytes = codes_[0].size();
    const auto plain_bytes =
        numbers_[0].size() * static_cast<std::size_t>(size_of(shape_.dtype).n);
    const DeviceBytes slots[2] = {
        plain ? DeviceBytes(numbers_[0].data(), plain_bytes) : DeviceBytes(codes_[0].data(), bytes),
        plain ? DeviceBytes(numbers_[1].data(), plain_bytes) : DeviceBytes(codes_[1].data(), bytes)};
    const StoredOnDevice q(q_);
    const StoredOnDevice out(Stored(shape_.dtype, q_.size()));
    const OnDevice<ContextBlock> blocks(table_);
    const OnDevice<AttentionSequence> sequences(std::vector<AttentionSequence>{
        {.first_row = context, .new_tokens = case_.tokens - context, .context = context}});
    cuda::attention({.out = out.get(),
                     .q = q.get(),
                     .slots = {slots[0].get(), slots[1].get(), nullptr},
                     .dtype = shape_.dtype,
                     .format = format,
                     .row_dtype = shape_.dtype,
                     .blocks = blocks.get(),
                     .sequences = sequences.get(),
                     .sequence_count = 1,
                     .heads = case_.kv_heads * case_.group,
                     .kv_heads = case_.kv_heads,
                     .head_dim = case_.head_dim,
                     .scale = 0.1f,
                     .max_new_tokens = case_.tokens - context,
                     .max_context = case_.tokens,
                     .window = case_.window},
                    nullptr);
    const std::vector<float> all = floats_of(out.read());
    return {all.begin() + static_cast<std::ptrdiff_t>(context) *
                              static_cast<std::ptrdiff_t>(q_row()),
            all.end()};
  }

 private:
  std::size_t q_row() const {
    return static_cast<std::size_t>(case_.kv_heads * case_.group * case_.head_dim);
  }

  KvShape shape_;
  Case case_;
  Stored q_;
  std::vector<ContextBlock> table_;
  std::vector<std::byte> codes_[2];
  Stored numbers_[2] = {Stored(DType::float32, 0), Stored(DType::float32, 0)};
};

TEST_F(CudaQuantizeKv, AttentionOverCodesHasTheBitsOfAttentionOverTheirNumbers) {
  for (const DType dtype : kAllTypes) {
    for (const KvFormat format : kFormats) {
      for (const Case& c :
           {Case{2, 64, 1, 0, 700}, Case{1, 128, 8, 0, 1100}, Case{2, 80, 2, 0, 90},
            Case{1, 16, 4, 100, 300}, Case{1, 200, 1, 0, 130}, Case{3, 5, 1, 0, 70},
            Case{1, 65, 2, 33, 150}, Case{1, 256, 16, 0, 260}}) {
        const OneSequence sequence({c.kv_heads, c.head_dim, dtype, format}, c);
        for (const std::int32_t context : {0, c.tokens / 2, c.tokens - 1}) {
          EXPECT_TRUE(same_bits(sequence.attend(format, context),
                                sequence.attend(KvFormat::plain, context)))
              << name_of(dtype) << " as " << name_of(format) << ", heads of " << c.head_dim
              << ", after " << context;
        }
      }
    }
  }
}

}  // namespace
}  // namespace poise::test
