// The operations that take rows one at a time, held to their CPU versions.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>

#include "tests/kernels/cuda/on_device.h"

namespace poise::test {
namespace {

class CudaRows : public CudaTest {};
class CudaLayerNorm : public CudaTest {};
class CudaRmsNorm : public CudaTest {};
class CudaRotate : public CudaTest {};
class CudaGatedActivation : public CudaTest {};
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

TEST_F(CudaRmsNorm, IsWhatTheCpuComputes) {
  cpu::Workers workers(2);
  for (const DType dtype : kAllTypes) {
    for (const DType out_dtype : {dtype, DType::float32}) {
      for (const std::int32_t dim : {1, 2, 7, 8, 9, 768, 2048, 2049, 5000, 8192, 16384, 16383}) {
        constexpr std::int32_t kRows = 3;
        const auto width = static_cast<std::size_t>(dim);
        const std::int32_t gap = dim % 8 == 0 ? 8 : 2;  // rows in eights, and not
        const std::vector<float> in = normal_values(13, kRows * width, 3);
        const Stored weight(dtype, normal_values(14, width));
        Stored expected(out_dtype,
                        std::vector<float>(kRows * static_cast<std::size_t>(dim + gap), -7));
        const StoredOnDevice out(expected);
        RmsNorm op{.out = {expected.data(), out_dtype, dim + gap},
                   .in = in.data(),
                   .weight = weight.data(),
                   .dtype = dtype,
                   .rows = kRows,
                   .dim = dim,
                   .epsilon = 1e-6f};
        cpu::rms_norm(op, workers);
        const OnDevice<float> in_there(in);
        const StoredOnDevice weight_there(weight);
        op.out.data = out.get();
        op.in = in_there.get();
        op.weight = weight_there.get();
        cuda::rms_norm(op, nullptr);
        const std::vector<float> got = floats_of(out.read());
        for (std::size_t i = 0; i < got.size(); ++i) {
          // Sums of squares err by their dim / 16 + 8 roundings on either side, their root by half of
          // that; then a few roundings of the root, its reciprocal and two products.
          const auto want = static_cast<double>(expected[i]);
          ASSERT_NEAR(
              static_cast<double>(got[i]), want,
              std::fabs(want) * ((dim / 16.0 + 24) * 0x1p-24 + 2.1 * rounding(out_dtype)) + 0x1p-24)
              << "dim " << dim << " of " << name_of(dtype) << " at " << i;
        }
      }
    }
  }
}

TEST_F(CudaRmsNorm, OfARowHasTheSameBitsAloneAndAmongOthers) {
  for (const std::int32_t dim : {9, 768, 5001, 8192}) {
    constexpr std::int32_t kRows = 150;
    const auto width = static_cast<std::size_t>(dim);
    const OnDevice<float> in(normal_values(15, kRows * width));
    const StoredOnDevice weight(Stored(DType::bfloat16, normal_values(16, width)));
    const OnDevice<float> together(kRows * width);
    const OnDevice<float> apart(kRows * width);
    const auto norm = [&](float* out, const float* from, std::int32_t rows) {
      cuda::rms_norm({.out = {out, DType::float32, dim},
                      .in = from,
                      .weight = weight.get(),
                      .dtype = DType::bfloat16,
                      .rows = rows,
                      .dim = dim,
                      .epsilon = 1e-6f},
                     nullptr);
    };
    norm(together.get(), in.get(), kRows);
    for (std::size_t r = 0; r < kRows; ++r) {
      norm(apart.get() + r * width, in.get() + r * width, 1);
    }
    EXPECT_TRUE(same_bits(together.read(), apart.read())) << dim;
  }
}

// Rows of [K V], of which K is rotated: every form of head, eights or not.
struct Rotated {
  std::int32_t heads, head_dim, rotary_dim;
  bool norm;
};
std::ostream& operator<<(std::ostream& out, const Rotated& c) {
  return out << c.heads << " heads of " << c.head_dim << ", " << c.rotary_dim << " rotated"
             << (c.norm ? ", normed" : "");
}
constexpr Rotated kRotated[] = {{1, 2, 2, false},    {3, 16, 16, true},    {8, 64, 64, false},
                                {4, 64, 64, true},   {9, 80, 80, false},   {5, 80, 80, true},
                                {7, 80, 32, false},  {7, 80, 32, true},    {8, 128, 128, false},
                                {8, 128, 128, true}, {33, 128, 128, true}, {2, 256, 256, true},
                                {3, 96, 96, false},  {3, 20, 20, false},   {3, 36, 20, true},
                                {2, 7, 0, true},     {2, 16, 0, true},     {1, 256, 256, false}};
const std::vector<std::int32_t> kRotatedAt = {0,    1,    2,      17,     599,
                                              4095, 8191, 131071, 262143, 1048575};

class Rotation {
 public:
  Rotation(const Rotated& c, DType dtype)
      : c_(c),
        dtype_(dtype),
        stride_(std::int64_t{2} * c.heads * c.head_dim),
        before_(dtype, normal_values(17, kRotatedAt.size() * static_cast<std::size_t>(stride_))),
        norm_(dtype, normal_values(18, static_cast<std::size_t>(c.head_dim))) {
    for (const double base : {10000.0, 500000.0}) {
      for (std::int32_t i = 0; i < c.rotary_dim / 2; ++i) {
        table_.push_back(static_cast<float>(std::pow(base, -2.0 * i / c.rotary_dim)));
      }
    }
    for (const std::int32_t position : kRotatedAt) {
      places_.push_back({.position = position, .frequencies = position % 2});
    }
  }

  Stored on_cpu() const {
    cpu::Workers workers(2);
    Stored rows = before_;
    Rotate op = operation(static_cast<std::int64_t>(places_.size()));
    op.inout.data = rows.data();
    op.places = places_.data();
    op.frequencies = table_.data();
    op.norm_weight = c_.norm ? norm_.data() : nullptr;
    cpu::rotate(op, workers);
    return rows;
  }

  // So many rows at a time.
  Stored on_device(std::int64_t part) const {
    const StoredOnDevice rows(before_), norm(norm_);
    const OnDevice<RotaryPlace> places(places_);
    const OnDevice<float> table(table_);
    const auto count = static_cast<std::int64_t>(places_.size());
    for (std::int64_t row = 0; row < count; row += part) {
      Rotate op = operation(std::min(part, count - row));
      op.inout.data = static_cast<std::byte*>(rows.get()) + row * stride_ * size_of(dtype_).n;
      op.places = places.get() + row;
      op.frequencies = table.get();
      op.norm_weight = c_.norm ? norm.get() : nullptr;
      cuda::rotate(op, nullptr);
    }
    return rows.read();
  }

  // How much float32's roundings may change the number at `i` of all rows: by so many units of the
  // two numbers of its pair, after a norm.
  double magnitude(const Stored& after, std::size_t i) const {
    const auto dim = static_cast<std::size_t>(c_.head_dim);
    const auto pairs = static_cast<std::size_t>(c_.rotary_dim / 2);
    const std::size_t d = i % dim;
    const auto of = [&](std::size_t at) { return std::fabs(static_cast<double>(after[at])); };
    return of(i) + (d < 2 * pairs ? of(i - d + (d + pairs) % (2 * pairs)) : 0);
  }

 private:
  Rotate operation(std::int64_t rows) const {
    return {.inout = {nullptr, dtype_, stride_},
            .places = nullptr,
            .frequencies = nullptr,
            .norm_weight = nullptr,
            .dtype = dtype_,
            .rows = rows,
            .heads = c_.heads,
            .head_dim = c_.head_dim,
            .rotary_dim = c_.rotary_dim,
            .scale = 1.25f,
            .epsilon = 1e-6f};
  }

  Rotated c_;
  DType dtype_;
  std::int64_t stride_;
  Stored before_, norm_;
  std::vector<float> table_;
  std::vector<RotaryPlace> places_;
};

TEST_F(CudaRotate, HasTheCpusBitsWithoutANorm) {
  for (const DType dtype : kAllTypes) {
    for (const Rotated& c : kRotated) {
      if (!c.norm) {
        const Rotation rotation(c, dtype);
        EXPECT_TRUE(rotation.on_device(1000) == rotation.on_cpu()) << c << ", " << name_of(dtype);
      }
    }
  }
}

TEST_F(CudaRotate, IsWhatTheCpuComputesAfterANorm) {
  for (const DType dtype : kAllTypes) {
    for (const Rotated& c : kRotated) {
      if (c.norm) {
        const Rotation rotation(c, dtype);
        const Stored want = rotation.on_cpu();
        const Stored got = rotation.on_device(1000);
        for (std::size_t i = 0; i < want.size(); ++i) {
          // The norms' sums of up to 256 squares differ in order: 256 / 16 + 8 roundings each, halved
          // by the root; a few more of the products. What is summed may be larger than the sum.
          const double own = std::fabs(static_cast<double>(want[i]));
          ASSERT_NEAR(static_cast<double>(got[i]), static_cast<double>(want[i]),
                      1.5 * rotation.magnitude(want, i) * 32 * 0x1p-24 +
                          own * 2.1 * rounding(dtype) + 0x1p-24)
              << c << ", " << name_of(dtype) << " at " << i;
        }
      }
    }
  }
}

TEST_F(CudaRotate, OfARowHasTheSameBitsAloneAndAmongOthers) {
  for (const DType dtype : kAllTypes) {
    for (const Rotated& c : kRotated) {
      const Rotation rotation(c, dtype);
      const Stored together = rotation.on_device(1000);
      EXPECT_TRUE(rotation.on_device(1) == together) << c << ", " << name_of(dtype);
      EXPECT_TRUE(rotation.on_device(3) == together) << c << ", " << name_of(dtype);
    }
  }
}

// Enough rows for teams that take several heads each.
TEST_F(CudaRotate, OfThousandsOfRowsServesThemAll) {
  constexpr std::int32_t kHeads = 20, kDim = 128, kRows = 9001;
  constexpr std::size_t kRow = std::size_t{2} * kHeads * kDim;
  const Stored some(DType::bfloat16, normal_values(19, kRow));
  Stored rows(DType::bfloat16, kRows * kRow);
  std::vector<RotaryPlace> places;
  for (std::size_t r = 0; r < kRows; ++r) {
    std::memcpy(static_cast<std::byte*>(rows.data()) + r * kRow * 2, some.data(), kRow * 2);
    places.push_back({.position = static_cast<std::int32_t>(r % 7), .frequencies = 0});
  }
  std::vector<float> table;
  for (std::int32_t i = 0; i < kDim / 2; ++i) {
    table.push_back(1.0f / static_cast<float>(i + 1));
  }
  const StoredOnDevice there(rows);
  const OnDevice<RotaryPlace> places_there(places);
  const OnDevice<float> table_there(table);
  cuda::rotate({.inout = {there.get(), DType::bfloat16, kRow},
                .places = places_there.get(),
                .frequencies = table_there.get(),
                .norm_weight = nullptr,
                .dtype = DType::bfloat16,
                .rows = kRows,
                .heads = kHeads,
                .head_dim = kDim,
                .rotary_dim = kDim,
                .scale = 1,
                .epsilon = 0},
               nullptr);
  cpu::Workers workers(2);
  cpu::rotate({.inout = {rows.data(), DType::bfloat16, kRow},
               .places = places.data(),
               .frequencies = table.data(),
               .norm_weight = nullptr,
               .dtype = DType::bfloat16,
               .rows = kRows,
               .heads = kHeads,
               .head_dim = kDim,
               .rotary_dim = kDim,
               .scale = 1,
               .epsilon = 0},
              workers);
  EXPECT_TRUE(there.read() == rows);
}

TEST_F(CudaRotate, ChecksItsShapes) {
  Rotate op{
      .inout = {nullptr, DType::float16, 512}, .dtype = DType::float16, .rows = 1, .heads = 1};
  op.head_dim = 264;
  EXPECT_ANY_THROW(cuda::rotate(op, nullptr));
  op.head_dim = 64;
  op.rotary_dim = 33;
  EXPECT_ANY_THROW(cuda::rotate(op, nullptr));
  op.rotary_dim = 66;
  EXPECT_ANY_THROW(cuda::rotate(op, nullptr));
  op.rotary_dim = 64;
  op.rows = 0;
  cuda::rotate(op, nullptr);
  cuda::cuda_check(cudaDeviceSynchronize(), "nothing");
}

TEST_F(CudaGatedActivation, IsWhatTheCpuComputes) {
  cpu::Workers workers(1);
  for (const DType dtype : kAllTypes) {
    for (const DType out_dtype : {dtype, DType::float32}) {
      for (const Epilogue activation :
           {Epilogue::none, Epilogue::relu, Epilogue::gelu, Epilogue::gelu_tanh, Epilogue::silu}) {
        for (const std::int32_t dim : {1, 8, 13, 2048, 2049, 5632}) {
          constexpr std::int32_t kRows = 3;
          const auto width = static_cast<std::size_t>(dim);
          const std::int32_t gap = dim % 8 == 0 ? 8 : 3;  // rows in eights, and not
          const std::size_t stride = 2 * width + static_cast<std::size_t>(gap);
          const std::size_t out_stride = width + static_cast<std::size_t>(gap);
          std::vector<float> values = normal_values(20, kRows * stride, 3);
          values[0] = -50;
          const Stored in(dtype, values);
          const Stored nothing(out_dtype, std::vector<float>(kRows * out_stride, -7));
          const StoredOnDevice in_there(in), out_there(nothing);
          Stored want = nothing;
          GatedActivation op{.out = {want.data(), out_dtype, dim + gap},
                             .in = {const_cast<void*>(in.data()), dtype, 2 * dim + gap},
                             .rows = kRows,
                             .dim = dim,
                             .activation = activation};
          cpu::gated_activation(op, workers);
          op.out.data = out_there.get();
          op.in.data = in_there.get();
          cuda::gated_activation(op, nullptr);
          const Stored got = out_there.read();
          for (std::size_t i = 0; i < got.size(); ++i) {
            // As CudaActivate's, times |up| < 15.
            const auto expected = static_cast<double>(want[i]);
            ASSERT_NEAR(static_cast<double>(got[i]), expected,
                        std::fabs(expected) * (2.1 * rounding(out_dtype) + 0x1p-20) + 15 * 0x1p-22)
                << "dim " << dim << " of " << name_of(dtype) << " at " << i;
          }
          if (out_dtype == dtype) {  // over the gates
            op.out = {in_there.get(), dtype, 2 * dim + gap};
            cuda::gated_activation(op, nullptr);
            const Stored inside = in_there.read();
            for (std::size_t i = 0; i < inside.size(); ++i) {
              const std::size_t c = i % stride;
              ASSERT_EQ(inside[i], c < width ? got[i / stride * out_stride + c] : in[i])
                  << "dim " << dim << " of " << name_of(dtype) << " at " << i;
            }
          }
        }
      }
    }
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
         {Epilogue::none, Epilogue::relu, Epilogue::gelu, Epilogue::gelu_tanh, Epilogue::silu}) {
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
