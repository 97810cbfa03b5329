// Every algorithm of cuBLASLt that would serve a product whatever its rows: its time beside the
// tensor cores' limit with many rows, beside memory's with fewer, and whether its bits are those of
// the one that is chosen; then those for few rows alone, and which of them serves.
//
//   poise-cuda-gemm-bench [hidden ...]

#include <cuda_runtime_api.h>
#include <fmt/core.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <random>
#include <string>
#include <vector>

#include "common/trouble.h"
#include "kernels/cuda/check.h"
#include "kernels/cuda/gemm.h"

namespace poise::bench {
namespace {

using cuda::cuda_check;

constexpr std::int64_t kMany = 8192, kFewer = 128, kCompared = 256, kFew = 20;
constexpr std::int64_t kBeyondCache = 256 << 20;  // bytes of weights, so that none is found in L2

class Memory {
 public:
  // Random float16 numbers around 0.
  explicit Memory(std::int64_t numbers) : bytes_(static_cast<std::size_t>(numbers) * 2) {
    cuda_check(cudaMalloc(&data_, bytes_));
    std::mt19937 random(static_cast<unsigned>(numbers));
    std::vector<std::uint16_t> some(std::min<std::size_t>(bytes_ / 2, 1 << 20));
    for (std::uint16_t& one : some) {
      one = static_cast<std::uint16_t>((random() & 0x83ffu) | 0x2000u | (random() & 0x0c00u));
    }
    for (std::size_t at = 0; at < bytes_; at += some.size() * 2) {
      cuda_check(cudaMemcpy(static_cast<char*>(data_) + at, some.data(),
                            std::min(some.size() * 2, bytes_ - at), cudaMemcpyHostToDevice));
    }
  }
  ~Memory() { static_cast<void>(cudaFree(data_)); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  void* get() const { return data_; }

 private:
  std::size_t bytes_;
  void* data_ = nullptr;
};

struct Product {
  const char* name;
  std::int32_t outputs, inputs;
  bool wide;  // float32 outputs, added to what is there
};

int number(const cuda::Algorithm& algorithm, cuda::lt::AlgoAttribute what) {
  int value = -1;
  std::size_t written = 0;
  cuda::lt::functions().algo_get(&algorithm.lt, what, &value, sizeof value, &written);
  return value;
}

class Measured {
 public:
  Measured(cuda::Gemms& gemms, const Product& product)
      : gemms_(gemms),
        product_(product),
        copies_(kBeyondCache / weight_bytes() + 1),
        weight_(copies_ * weight_bytes() / 2),
        bias_(product.outputs),
        in_(kMany * product.inputs),
        out_(kMany * product.outputs * (product.wide ? 2 : 1)) {
    cuda_check(cudaEventCreate(&begin_));
    cuda_check(cudaEventCreate(&end_));
  }
  ~Measured() {
    static_cast<void>(cudaEventDestroy(begin_));
    static_cast<void>(cudaEventDestroy(end_));
  }
  Measured(const Measured&) = delete;
  Measured& operator=(const Measured&) = delete;

  void print() {
    const auto compared =
        static_cast<std::size_t>(kCompared * product_.outputs) * (product_.wide ? 4 : 2);
    const std::vector<cuda::Algorithm> all = gemms_.algorithms(op(kMany));
    const std::vector<char> first = bits(all.front(), kCompared, compared);
    int index = 0;
    for (const cuda::Algorithm& algo : all) {
      const double many = seconds(algo, kMany, 5);
      const double fewer = seconds(algo, kFewer, 10);
      fmt::print("{} {:>8.1f} us {:>6.1f} TFLOP/s  {}  {}\n", name_of(algo, index++), many * 1e6,
                 2.0 * kMany * product_.outputs * product_.inputs / many / 1e12,
                 beside_memory(fewer),
                 bits(algo, kCompared, compared) == first ? "same bits" : "OTHER BITS");
    }
    print_for_few(all, first, kFew, cuda::Gemms::kFewRows[0]);
    print_for_few(all, first, kFewer, cuda::Gemms::kFewRows[2]);
  }

 private:
  std::int64_t weight_bytes() const { return std::int64_t{2} * product_.outputs * product_.inputs; }

  // With the next copy of the weight.
  Gemm op(std::int64_t rows) {
    copy_ = (copy_ + 1) % copies_;
    return Gemm{.out = {.data = out_.get(),
                        .dtype = product_.wide ? DType::float32 : DType::float16,
                        .stride = product_.outputs},
                .in = {.data = in_.get(), .dtype = DType::float16, .stride = product_.inputs},
                .weight = {.data = static_cast<char*>(weight_.get()) + copy_ * weight_bytes(),
                           .rows = product_.outputs,
                           .cols = product_.inputs,
                           .dtype = DType::float16},
                .bias = product_.wide ? nullptr : bias_.get(),
                .residual = product_.wide ? static_cast<const float*>(out_.get()) : nullptr,
                .rows = rows,
                .epilogue = Epilogue::none};
  }

  double seconds(const cuda::Algorithm& algo, std::int64_t rows, int repeats) {
    gemms_.run_with(op(rows), algo, nullptr);
    cuda_check(cudaEventRecord(begin_, nullptr));
    for (int i = 0; i < repeats; ++i) {
      gemms_.run_with(op(rows), algo, nullptr);
    }
    cuda_check(cudaEventRecord(end_, nullptr));
    cuda_check(cudaEventSynchronize(end_));
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, begin_, end_));
    return static_cast<double>(ms) / 1e3 / repeats;
  }

  std::vector<char> bits(const cuda::Algorithm& algo, std::int64_t rows, std::size_t bytes) {
    std::vector<char> values(bytes);
    cuda_check(cudaMemset(out_.get(), 0, bytes));
    copy_ = 0;
    gemms_.run_with(op(rows), algo, nullptr);
    cuda_check(cudaMemcpy(values.data(), out_.get(), bytes, cudaMemcpyDeviceToHost));
    return values;
  }

  void print_for_few(const std::vector<cuda::Algorithm>& all, const std::vector<char>& first,
                     std::int64_t rows, std::int64_t up_to) {
    const auto compared = static_cast<std::ptrdiff_t>(first.size() / kCompared) * rows;
    const std::vector<char> right(first.begin(), first.begin() + compared);
    const cuda::Algorithm serving = gemms_.serving(op(rows), nullptr);
    const auto line = [&](const cuda::Algorithm& algo, int index, const char* which) {
      const bool serves =
          algo.few_rows == serving.few_rows &&
          std::equal(std::begin(algo.lt.data), std::end(algo.lt.data), serving.lt.data);
      fmt::print("{} {:>3} rows {}  {}{}{}\n", name_of(algo, index), rows,
                 beside_memory(seconds(algo, rows, 20)),
                 bits(algo, rows, right.size()) == right ? "same bits" : "OTHER BITS", which,
                 serves ? "  serves" : "");
    };
    line(all.front(), 0, "  chosen for many");
    std::vector<cuda::Algorithm> some = gemms_.algorithms(op(rows), up_to);
    if (rows <= cuda::kMaxFewRows) {
      some.push_back({.few_rows = true});
    }
    some.push_back(serving);  // which may be another one of those for many
    for (std::size_t i = 0; i < some.size(); ++i) {
      line(some[i], static_cast<int>(i), "");
    }
  }

  std::string name_of(const cuda::Algorithm& algo, int index) const {
    if (algo.few_rows) {
      return fmt::format("{:<8} {:>6} x {:<6} #{:<3} {:<51}", product_.name, product_.outputs,
                         product_.inputs, index, "our kernel for few rows");
    }
    return fmt::format(
        "{:<8} {:>6} x {:<6} #{:<3} id {:<4} tile {:<4} stages {:<3} cluster {:<3} inner {:<3}",
        product_.name, product_.outputs, product_.inputs, index, number(algo, cuda::lt::kAlgoId),
        number(algo, cuda::lt::kAlgoTile), number(algo, cuda::lt::kAlgoStages),
        number(algo, static_cast<cuda::lt::AlgoAttribute>(8)),
        number(algo, static_cast<cuda::lt::AlgoAttribute>(7)));
  }
  std::string beside_memory(double time) const {
    return fmt::format("{:>7.1f} us {:>6.0f} GB/s", time * 1e6,
                       static_cast<double>(weight_bytes()) / time / 1e9);
  }

  cuda::Gemms& gemms_;
  Product product_;
  std::int64_t copies_, copy_ = 0;
  Memory weight_, bias_, in_, out_;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
};

void run(const std::vector<std::int32_t>& sizes) {
  cuda::Gemms gemms;
  for (const std::int32_t h : sizes) {
    for (const Product& product :
         {Product{"kv", 2 * h, h, false}, Product{"q", h, h, false}, Product{"o", h, h, true},
          Product{"fc1", 4 * h, h, false}, Product{"fc2", h, 4 * h, true}}) {
      Measured(gemms, product).print();
    }
  }
}

}  // namespace
}  // namespace poise::bench

int main(int argc, char** argv) {
  try {
    std::vector<std::int32_t> sizes;
    for (int i = 1; i < argc; ++i) {
      sizes.push_back(std::stoi(argv[i]));
    }
    poise::bench::run(sizes.empty() ? std::vector<std::int32_t>{4096, 5120, 7168} : sizes);
  } catch (const std::exception& problem) {
    fmt::print(stderr, "poise-cuda-gemm-bench: {}\n", problem.what());
    return 1;
  }
}
