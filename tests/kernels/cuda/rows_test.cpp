// The operations that take rows one at a time, held to their CPU versions.
#include <algorithm>
#include <cmath>
#include <random>

#include "tests/kernels/cuda/on_device.h"

namespace poise::test {
namespace {

class CudaRows : public CudaTest {};
class CudaLayerNorm : public CudaTest {};
class CudaActivate : public CudaTest {};

constexpr std::int32_t kDims[] = {1, 2, 7, 8, 9, 100, 2047, 2048, 2049, 5000};

TEST_F(CudaRows, EmbedTokensCopiesTheTokensRow) {
  cpu::Workers workers(1);
  constexpr std::int32_t kVocabulary = 37;
  const std::vector<std::int32_t> tokens = {36, 0, 5, 5, 17};
  for (const DType dtype : kAllTypes) {
    for (const std::int32_t dim : kDims) {
      const auto width = static_cast<std::size_t>(dim);
      const Stored table(dtype, normal_values(1, kVocabulary * width));
      std::vector<float> expected(tokens.size() * width);
      const PackedWeight packed(table, kVocabulary, dim);
      cpu::embed_tokens({expected.data(), tokens.data(), packed.matrix(), 5}, workers);
      const StoredOnDevice on_device(table);
      const OnDevice<std::int32_t> ids(tokens);
      const OnDevice<float> out(expected.size());
      cuda::embed_tokens({out.get(), ids.get(), {on_device.get(), kVocabulary, dim, dtype}, 5},
                         nullptr);
      EXPECT_TRUE(same_bits(out.read(), expected)) << dim << " of " << name_of(dtype);
    }
  }
}

// More than go with one kernel's arguments, of sizes and at places that words do not divide.
TEST_F(CudaRows, CopyBatchBringsEveryCopyToItsPlace) {
  constexpr std::size_t kSpace = std::size_t{1} << 20;
  for (const std::size_t unit : {1, 4, 16}) {
    for (const std::size_t count : {2, 64, 65, 1024, 2500}) {
      std::mt19937 random(static_cast<unsigned>(count * unit));
      std::vector<std::uint8_t> from(kSpace), expected(kSpace, 7);
      std::ranges::generate(from, [&] { return static_cast<std::uint8_t>(random()); });
      const OnDevice<std::uint8_t> source(from), target(expected);
      const std::size_t room = kSpace / count / unit;  // of each copy, in units
      std::vector<cuda::DeviceCopy> copies;
      for (std::size_t i = 0; i < count; ++i) {
        const std::size_t units = i % 5 == 0 ? 0 : i % 3 == 0 ? room : random() % room;
        const std::size_t to = i * room * unit, at = (count - 1 - i) * room * unit;
        copies.push_back(
            {target.get() + to, source.get() + at, static_cast<std::int64_t>(units * unit)});
        std::copy_n(from.begin() + static_cast<std::ptrdiff_t>(at), units * unit,
                    expected.begin() + static_cast<std::ptrdiff_t>(to));
      }
      cuda::copy_batch(copies, nullptr);
      EXPECT_EQ(target.read(), expected) << count << " copies, in units of " << unit;
    }
  }
  cuda::copy_batch({}, nullptr);
}

TEST_F(CudaRows, AddPositionsAddsTheRowBehindTheOffset) {
  cpu::Workers workers(1);
  const std::vector<std::int32_t> positions = {0, 9, 3};
  for (const DType dtype : kAllTypes) {
    for (const std::int32_t dim : kDims) {
      const auto width = static_cast<std::size_t>(dim);
      const Stored table(dtype, normal_values(2, 12 * width));
      std::vector<float> expected = normal_values(3, 3 * width);
      const OnDevice<float> inout(expected);
      cpu::add_positions({expected.data(), positions.data(), table.data(), dtype, 3, dim, 2},
                         workers);
      const StoredOnDevice on_device(table);
      const OnDevice<std::int32_t> at(positions);
      cuda::add_positions({inout.get(), at.get(), on_device.get(), dtype, 3, dim, 2}, nullptr);
      EXPECT_TRUE(same_bits(inout.read(), expected)) << dim << " of " << name_of(dtype);
    }
  }
}

TEST_F(CudaRows, ConvertRoundsToNearestEvenAndLeavesTheRestOfARow) {
  cpu::Workers workers(1);
  for (const DType dtype : kAllTypes) {
    for (const std::int32_t dim : kDims) {
      for (const std::int32_t gap : {0, 3, 8}) {
        const auto width = static_cast<std::size_t>(dim);
        const std::size_t stride = width + static_cast<std::size_t>(gap);
        std::vector<float> in = normal_values(4, 3 * width, 100);
        in[0] = 1e30f;
        in[in.size() - 1] = 3e-6f;
        Stored expected(dtype, std::vector<float>(3 * stride, -7));
        const StoredOnDevice out(expected);
        cpu::convert({{expected.data(), dtype, dim + gap}, in.data(), 3, dim}, workers);
        const OnDevice<float> from(in);
        cuda::convert({{out.get(), dtype, dim + gap}, from.get(), 3, dim}, nullptr);
        EXPECT_TRUE(out.read() == expected) << dim << " + " << gap << " of " << name_of(dtype);
      }
    }
  }
}

TEST_F(CudaRows, ScatterMovesRowsOfAnyWidth) {
  cpu::Workers workers(1);
  const std::vector<RowMove> moves = {{0, 6}, {3, 0}, {1, 2}, {3, 4}};
  for (const std::int64_t row_bytes : {2, 4, 12, 16, 48, 6, 4096, 5000}) {
    std::vector<std::byte> in(static_cast<std::size_t>(4 * row_bytes));
    for (std::size_t i = 0; i < in.size(); ++i) {
      in[i] = static_cast<std::byte>(i * 7 + i / 256);
    }
    std::vector<std::byte> expected(static_cast<std::size_t>(7 * row_bytes), std::byte{9});
    const OnDevice<std::byte> out(expected);
    cpu::scatter_rows({expected.data(), in.data(), moves.data(), row_bytes, 4}, workers);
    const OnDevice<std::byte> from(in);
    const OnDevice<RowMove> which(moves);
    cuda::scatter_rows({out.get(), from.get(), which.get(), row_bytes, 4}, nullptr);
    EXPECT_TRUE(out.read() == expected) << row_bytes;
  }
}

TEST_F(CudaRows, AddBiasAddsWhatIsThere) {
  constexpr std::size_t kRows = 3;
  for (const DType dtype : kAllTypes) {
    for (const std::int32_t dim : kDims) {
      const auto width = static_cast<std::size_t>(dim);
      const std::size_t stride = width + 5;
      const Stored bias(dtype, normal_values(5, width));
      const StoredOnDevice bias_there(bias);
      const std::vector<float> residual = normal_values(6, kRows * stride);
      for (const bool with_bias : {true, false}) {
        for (const int kind : {0, 1, 2}) {  // no residual, another array, the same
          const OnDevice<float> other(residual);
          const OnDevice<float> inout(kind == 2 ? residual
                                                : std::vector<float>(kRows * stride, -7));
          const float* before = kind == 0 ? nullptr : kind == 1 ? other.get() : inout.get();
          cuda::add_bias(inout.get(), before, with_bias ? bias_there.get() : nullptr, dtype, kRows,
                         dim, static_cast<std::int64_t>(stride), nullptr);
          const std::vector<float> out = inout.read();
          for (std::size_t i = 0; i < out.size(); ++i) {
            const std::size_t c = i % stride;
            const float old = kind == 2 ? residual[i] : -7;
            const float sum =
                (with_bias && c < width ? bias[c] : 0.0f) + (kind == 0 ? 0.0f : residual[i]);
            ASSERT_EQ(out[i], c < width ? sum : old) << dim << " at " << i;
          }
        }
      }
    }
  }
}

TEST_F(CudaLayerNorm, IsWhatTheCpuComputes) {
  cpu::Workers workers(2);
  for (const DType dtype : kAllTypes) {
    for (const DType out_dtype : {dtype, DType::float32}) {
      for (const std::int32_t dim : {1, 2, 7, 8, 9, 768, 2048, 2049, 5000, 7168, 16384, 16383}) {
        for (const bool affine : {true, false}) {
          constexpr std::int32_t kRows = 3;
          const auto width = static_cast<std::size_t>(dim);
          std::vector<float> in = normal_values(7, kRows * width, 3);
          for (float& x : in) {
            x += 10;
          }
          const Stored weight(dtype, normal_values(8, width));
          const Stored bias(dtype, normal_values(9, width));
          Stored expected(out_dtype, std::vector<float>(kRows * (width + 2), -7));
          const StoredOnDevice out(expected);
          LayerNorm op{.out = {expected.data(), out_dtype, dim + 2},
                       .in = in.data(),
                       .weight = affine ? weight.data() : nullptr,
                       .bias = affine ? bias.data() : nullptr,
                       .dtype = dtype,
                       .rows = kRows,
                       .dim = dim,
                       .epsilon = 1e-5f};
          cpu::layer_norm(op, workers);
          const OnDevice<float> in_there(in);
          const StoredOnDevice weight_there(weight);
          const StoredOnDevice bias_there(bias);
          op.out.data = out.get();
          op.in = in_there.get();
          op.weight = affine ? weight_there.get() : nullptr;
          op.bias = affine ? bias_there.get() : nullptr;
          cuda::layer_norm(op, nullptr);
          const std::vector<float> got = floats_of(out.read());
          for (std::size_t i = 0; i < got.size(); ++i) {
            // Both err by the roundings of a mean near 10 and of a variance, over sums of dim / 16
            // terms at most; the scaled value is below 6, its weight below 5.
            const double sums = (dim / 16.0 + 24) * 0x1p-24 * 6 * 5 * 2;
            const auto want = static_cast<double>(expected[i]);
            ASSERT_NEAR(static_cast<double>(got[i]), want,
                        sums + 2.1 * std::fabs(want) * rounding(out_dtype))
                << "dim " << dim << " of " << name_of(dtype) << " at " << i;
          }
        }
      }
    }
  }
}

TEST_F(CudaLayerNorm, OfARowHasTheSameBitsAloneAndAmongOthers) {
  for (const std::int32_t dim : {9, 768, 5001, 7168}) {
    constexpr std::int32_t kRows = 150;
    const auto width = static_cast<std::size_t>(dim);
    const OnDevice<float> in(normal_values(10, kRows * width));
    const StoredOnDevice weight(Stored(DType::float16, normal_values(11, width)));
    const OnDevice<float> together(kRows * width);
    const OnDevice<float> apart(kRows * width);
    const auto norm = [&](float* out, const float* from, std::int32_t rows) {
      cuda::layer_norm({.out = {out, DType::float32, dim},
                        .in = from,
                        .weight = weight.get(),
                        .bias = nullptr,
                        .dtype = DType::float16,
                        .rows = rows,
                        .dim = dim,
                        .epsilon = 1e-5f},
                       nullptr);
    };
    norm(together.get(), in.get(), kRows);
    for (std::size_t r = 0; r < kRows; ++r) {
      norm(apart.get() + r * width, in.get() + r * width, 1);
    }
    EXPECT_TRUE(same_bits(together.read(), apart.read())) << dim;
  }
}

// By the Gemm of the CPU with one input of weight one: its epilogue alone.
std::vector<float> on_cpu(const std::vector<float>& x, Epilogue epilogue) {
  cpu::Workers workers(1);
  const PackedWeight one(Stored(DType::float32, std::vector<float>{1}), 1, 1);
  std::vector<float> in = x;
  std::vector<float> out(x.size());
  cpu::gemm({.out = {out.data(), DType::float32, 1},
             .in = {in.data(), DType::float32, 1},
             .weight = one.matrix(),
             .bias = nullptr,
             .residual = nullptr,
             .rows = static_cast<std::int64_t>(x.size()),
             .epilogue = epilogue},
            workers);
  return out;
}

TEST_F(CudaActivate, IsWhatTheCpuComputes) {
  for (const DType dtype : kAllTypes) {
    for (const Epilogue epilogue :
         {Epilogue::none, Epilogue::relu, Epilogue::gelu, Epilogue::gelu_tanh}) {
      for (const std::int32_t dim : {1, 8, 13, 4100}) {
        constexpr std::int32_t kRows = 3;
        const std::size_t stride = static_cast<std::size_t>(dim) + 3;
        std::vector<float> values = normal_values(12, kRows * stride, 3);
        values[0] = -50;
        const Stored before(dtype, values);
        const std::vector<float> expected = on_cpu(floats_of(before), epilogue);
        const StoredOnDevice inout(before);
        cuda::activate({inout.get(), dtype, static_cast<std::int64_t>(stride)}, kRows, dim,
                       epilogue, nullptr);
        const Stored after = inout.read();
        for (std::size_t i = 0; i < after.size(); ++i) {
          if (i % stride < static_cast<std::size_t>(dim)) {
            const auto want = static_cast<double>(expected[i]);
            ASSERT_NEAR(static_cast<double>(after[i]), want,
                        std::fabs(want) * (1.01 * rounding(dtype) + 0x1p-20) + 0x1p-22)
                << name_of(dtype) << " of " << before[i];
          } else {
            ASSERT_EQ(after[i], before[i]);
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace poise::test
