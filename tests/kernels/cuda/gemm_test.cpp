#include "kernels/cuda/gemm.h"

#include <fmt/core.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/cuda/trial.h"
#include "tests/kernels/cuda/on_device.h"

namespace poise::test {
namespace {

struct Shape {
  std::int32_t outputs, inputs;
  DType dtype;
  bool wide;  // float32 outputs, added to a residual
};

// One past every tile, few rows and many.
constexpr std::int64_t kMaxRows = 2049;
constexpr std::int64_t kRowsTried[] = {1, 2, 20, 33, 64, 65, 128, 129, 256, 257, 1024};

class CudaGemm : public CudaTest {};

class OnDeviceOperands {
 public:
  explicit OnDeviceOperands(const Shape& shape, std::int64_t most = kMaxRows)
      : shape_(shape),
        out_type_(shape.wide ? DType::float32 : shape.dtype),
        in_(shape.dtype, normal_values(1, count(most, shape.inputs))),
        weight_(shape.dtype, normal_values(2, count(shape.outputs, shape.inputs), 0.05f)),
        bias_(shape.dtype, normal_values(3, count(1, shape.outputs))),
        residual_(normal_values(4, count(most, shape.outputs))),
        in_there_(in_),
        weight_there_(weight_),
        bias_there_(bias_),
        residual_there_(residual_) {}

  Gemm op(void* out, std::int64_t rows, Epilogue epilogue = Epilogue::none) const {
    return {.out = {out, out_type_, shape_.outputs},
            .in = {in_there_.get(), shape_.dtype, shape_.inputs},
            .weight = {weight_there_.get(), shape_.outputs, shape_.inputs, shape_.dtype},
            .bias = bias_there_.get(),
            .residual = shape_.wide ? residual_there_.get() : nullptr,
            .rows = rows,
            .epilogue = epilogue};
  }
  DType out_type() const { return out_type_; }
  std::size_t outputs(std::int64_t rows) const { return count(rows, shape_.outputs); }

  // In float64, of one output.
  double expected(std::size_t row, std::size_t output, double* magnitude) const {
    const auto inputs = static_cast<std::size_t>(shape_.inputs);
    auto sum = static_cast<double>(bias_[output]);
    *magnitude = std::fabs(sum);
    for (std::size_t k = 0; k < inputs; ++k) {
      const double product = static_cast<double>(in_[row * inputs + k]) *
                             static_cast<double>(weight_[output * inputs + k]);
      sum += product;
      *magnitude += std::fabs(product);
    }
    if (shape_.wide) {
      sum +=
          static_cast<double>(residual_[row * static_cast<std::size_t>(shape_.outputs) + output]);
    }
    return sum;
  }

 private:
  static std::size_t count(std::int64_t rows, std::int32_t width) {
    return static_cast<std::size_t>(rows) * static_cast<std::size_t>(width);
  }

  Shape shape_;
  DType out_type_;
  Stored in_, weight_, bias_;
  std::vector<float> residual_;
  StoredOnDevice in_there_, weight_there_, bias_there_;
  OnDevice<float> residual_there_;
};

constexpr Shape kShapes[] = {
    {768, 768, DType::float16, false},  {1536, 768, DType::bfloat16, false},
    {3072, 768, DType::float16, false}, {768, 3072, DType::float16, true},
    {768, 3072, DType::bfloat16, true}, {513, 96, DType::float32, true},
    {4096, 4096, DType::float16, true}};

std::string text_of(const Shape& shape) {
  return fmt::format("{} x {} {}{}", shape.outputs, shape.inputs, name_of(shape.dtype),
                     shape.wide ? " wide" : "");
}

// Every 37th output, held to float64.
void expect_product(const OnDeviceOperands& operands, const Shape& shape, const Stored& got,
                    bool relu = false) {
  for (std::size_t at = 0; at < got.size(); at += 37) {
    const auto outputs = static_cast<std::size_t>(shape.outputs);
    double magnitude = 0;
    const double sum = operands.expected(at / outputs, at % outputs, &magnitude);
    const double want = relu ? std::max(sum, 0.0) : sum;
    ASSERT_NEAR(static_cast<double>(got[at]), want,
                (shape.inputs + 2) * 0x1p-24 * magnitude +
                    1.01 * std::fabs(want) * rounding(operands.out_type()))
        << "at " << at;
  }
}

TEST_F(CudaGemm, IsTheProductForFewRowsAndForMany) {
  cuda::Gemms gemms;
  for (const Shape& shape : kShapes) {
    const OnDeviceOperands operands(shape);
    for (const std::int64_t rows : {std::int64_t{3}, std::int64_t{200}}) {
      SCOPED_TRACE(fmt::format("{}, {} rows", text_of(shape), rows));
      const StoredOnDevice out(Stored(operands.out_type(), operands.outputs(rows)));
      gemms.run(operands.op(out.get(), rows), nullptr);
      expect_product(operands, shape, out.read());
    }
  }
}

void expect_ours_is_the_product(const Shape& shape, std::initializer_list<std::int64_t> some_rows) {
  cuda::Gemms gemms;
  const OnDeviceOperands operands(shape, std::max(some_rows));
  for (const std::int64_t rows : some_rows) {
    for (const bool relu : {false, true}) {
      if (relu && shape.wide) {
        continue;  // no model has a residual before one
      }
      SCOPED_TRACE(fmt::format("{}, {} rows, relu {}", text_of(shape), rows, relu));
      const StoredOnDevice out(
          Stored(operands.out_type(), std::vector<float>(operands.outputs(rows + 1), -7)));
      gemms.run_with(operands.op(out.get(), rows, relu ? Epilogue::relu : Epilogue::none),
                     {.few_rows = true}, nullptr);
      std::vector<float> got = floats_of(out.read());
      for (std::size_t at = operands.outputs(rows); at < got.size(); ++at) {
        ASSERT_EQ(got[at], -7) << "behind the rows, at " << at;
      }
      got.resize(operands.outputs(rows));
      expect_product(operands, shape, Stored(operands.out_type(), got), relu);
    }
  }
}

// Inputs that do not fill its last stage, outputs that do not fill its last block of threads, every
// number of row tiles, one block and two on a multiprocessor.
TEST_F(CudaGemm, OurKernelForFewRowsIsTheProduct) {
  for (const Shape& shape : {Shape{513, 96, DType::float16, false},
                             {513, 136, DType::bfloat16, true},
                             {5000, 1000, DType::float16, false},
                             {8200, 1400, DType::bfloat16, false},
                             {8500, 1000, DType::float16, false},
                             {768, 3072, DType::float16, true},
                             {16, 8, DType::float16, true}}) {
    expect_ours_is_the_product(shape, {1, 8, 9, 20, 32, 33, 64});
  }
}

// Bias and residual as they come, which are added one after the other here and in two kernels there.
TEST_F(CudaGemm, OurKernelHasTheBitsOfTheAlgorithmForMany) {
  cuda::Gemms gemms;
  for (const Shape& shape : {Shape{1024, 4096, DType::float16, true},
                             {1024, 4096, DType::bfloat16, true},
                             {4096, 1024, DType::float16, false}}) {
    const OnDeviceOperands operands(shape, 64);
    for (const std::int64_t rows : {1, 20, 64}) {
      SCOPED_TRACE(fmt::format("{}, {} rows", text_of(shape), rows));
      const StoredOnDevice ours(Stored(operands.out_type(), operands.outputs(rows)));
      const StoredOnDevice theirs(Stored(operands.out_type(), operands.outputs(rows)));
      gemms.run_with(operands.op(ours.get(), rows), {.few_rows = true}, nullptr);
      const Gemm op = operands.op(theirs.get(), rows);
      gemms.run_with(op, gemms.algorithms(op).front(), nullptr);
      const Stored got = ours.read(), want = theirs.read();
      for (std::size_t at = 0; at < got.size(); ++at) {
        ASSERT_EQ(got[at], want[at]) << "at " << at;
      }
    }
  }
}

// Short enough for compute-sanitizer (bench/gpu_sections.py names it).
TEST_F(CudaGemm, OurKernelMultipliesAFewRows) {
  expect_ours_is_the_product({80, 2600, DType::float16, true}, {9});
}

TEST_F(CudaGemm, ARowHasTheSameBitsHoweverManyAreBesideIt) {
  cuda::Gemms gemms;
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(text_of(shape));
    const OnDeviceOperands operands(shape);
    const StoredOnDevice most(Stored(operands.out_type(), operands.outputs(kMaxRows)));
    gemms.run(operands.op(most.get(), kMaxRows), nullptr);
    const Stored all = most.read();
    for (const std::int64_t rows : kRowsTried) {
      const StoredOnDevice out(Stored(operands.out_type(), operands.outputs(rows)));
      gemms.run(operands.op(out.get(), rows), nullptr);
      const Stored got = out.read();
      for (std::size_t at = 0; at < got.size(); ++at) {
        ASSERT_EQ(got[at], all[at]) << rows << " rows, at " << at;
      }
    }
  }
}

constexpr Bytes kTried = kMiB;  // of scratch memory

// Of rows whose outputs are as long as they are.
cuda::Trial trial_in(const DeviceBytes& scratch) {
  return {.rows = 64,
          .in_dtype = DType::bfloat16,
          .in_stride = 512,
          .out_row = kKiB,
          .scratch = scratch.get(),
          .scratch_bytes = kTried,
          .stream = nullptr};
}

TEST_F(CudaGemm, AlgorithmsStandForEachOtherWhereEveryBitIsTheSame) {
  const DeviceBytes scratch(kTried.n);
  const cuda::Trial trial = trial_in(scratch);
  ASSERT_TRUE(trial.fits());
  const auto bytes = static_cast<std::size_t>(trial.out_bytes().n);
  const cuda::Trial::Way rows_themselves = [&](const void* in, void* out) {
    cuda::cuda_check(cudaMemcpyAsync(out, in, bytes, cudaMemcpyDeviceToDevice, nullptr));
  };
  int asked = 0;
  const cuda::Trial::Way another_now_and_then = [&](const void* in, void* out) {
    rows_themselves(in, out);
    if (++asked == 7) {
      cuda::cuda_check(cudaMemsetAsync(static_cast<std::byte*>(out) + bytes - 1, 0, 1, nullptr));
    }
  };
  EXPECT_TRUE(same_bits(trial, rows_themselves, rows_themselves));
  EXPECT_FALSE(same_bits(trial, rows_themselves, another_now_and_then));
  EXPECT_EQ(asked, 7);
}

TEST_F(CudaGemm, WhatATrialAddsToIsNotNothing) {
  const DeviceBytes scratch(kTried.n);
  cuda::Trial trial = trial_in(scratch);
  const auto bytes = static_cast<std::size_t>(trial.out_bytes().n);
  const cuda::Trial::Way adds_nothing = [](const void*, void*) {};
  const cuda::Trial::Way begins_anew = [&](const void*, void* out) {
    cuda::cuda_check(cudaMemsetAsync(out, 0, bytes, nullptr));
  };
  EXPECT_TRUE(same_bits(trial, adds_nothing, begins_anew));
  trial.adds = true;
  EXPECT_TRUE(same_bits(trial, adds_nothing, adds_nothing));
  EXPECT_FALSE(same_bits(trial, adds_nothing, begins_anew));
}

TEST_F(CudaGemm, ATrialSaysHowLongALaunchTakes) {
  const DeviceBytes scratch(1 << 20);
  const cuda::Trial trial{.rows = 1,
                          .in_dtype = DType::float32,
                          .in_stride = 64,
                          .out_row = kKiB,
                          .scratch = scratch.get(),
                          .scratch_bytes = {1 << 20},
                          .stream = nullptr};
  const auto clear = [&](std::size_t bytes, int times) -> cuda::Trial::Way {
    return [=](const void*, void* out) {
      for (int i = 0; i < times; ++i) {
        cuda::cuda_check(cudaMemsetAsync(out, 0, bytes, nullptr));
      }
    };
  };
  const Seconds once = time_of(trial, clear(1024, 1));
  EXPECT_GT(once.n, 0);
  EXPECT_GT(time_of(trial, clear(1024, 200)).n, 10 * once.n);
}

}  // namespace
}  // namespace poise::test
