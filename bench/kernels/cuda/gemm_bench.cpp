// Every algorithm of cuBLASLt that would serve a product whatever its rows: its time beside the
// tensor cores' limit with many rows, beside memory's with few, and whether its bits are those of
// the one that is chosen.
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

constexpr std::int64_t kMany = 8192, kFew = 128, kCompared = 256;

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

int number(const cuda::lt::Algo& algo, cuda::lt::AlgoAttribute what) {
  int value = -1;
  std::size_t written = 0;
  cuda::lt::functions().algo_get(&algo, what, &value, sizeof value, &written);
  return value;
}

void measure(cuda::Gemms& gemms, const Product& product) {
  const Memory weight(std::int64_t{product.outputs} * product.inputs), bias(product.outputs);
  const Memory in(kMany * product.inputs), out(kMany * product.outputs * (product.wide ? 2 : 1));
  const auto op = [&](std::int64_t rows) {
    return Gemm{.out = {.data = out.get(),
                        .dtype = product.wide ? DType::float32 : DType::float16,
                        .stride = product.outputs},
                .in = {.data = in.get(), .dtype = DType::float16, .stride = product.inputs},
                .weight = {.data = weight.get(),
                           .rows = product.outputs,
                           .cols = product.inputs,
                           .dtype = DType::float16},
                .bias = product.wide ? nullptr : bias.get(),
                .residual = product.wide ? static_cast<const float*>(out.get()) : nullptr,
                .rows = rows,
                .epilogue = Epilogue::none};
  };
  cudaEvent_t begin = nullptr, end = nullptr;
  cuda_check(cudaEventCreate(&begin));
  cuda_check(cudaEventCreate(&end));
  const auto time = [&](const cuda::lt::Algo& algo, std::int64_t rows, int repeats) {
    gemms.run_with(op(rows), algo, nullptr);
    cuda_check(cudaEventRecord(begin, nullptr));
    for (int i = 0; i < repeats; ++i) {
      gemms.run_with(op(rows), algo, nullptr);
    }
    cuda_check(cudaEventRecord(end, nullptr));
    cuda_check(cudaEventSynchronize(end));
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, begin, end));
    return static_cast<double>(ms) / 1e3 / repeats;
  };
  const std::size_t compared =
      static_cast<std::size_t>(kCompared * product.outputs) * (product.wide ? 4 : 2);
  std::vector<char> first(compared), bits(compared);
  int index = 0;
  for (const cuda::lt::Algo& algo : gemms.algorithms(op(kMany))) {
    cuda_check(cudaMemset(out.get(), 0, compared));
    gemms.run_with(op(kCompared), algo, nullptr);
    cuda_check(cudaMemcpy(bits.data(), out.get(), compared, cudaMemcpyDeviceToHost));
    if (index == 0) {
      first = bits;
    }
    const double many = time(algo, kMany, 5), few = time(algo, kFew, 10);
    const double flops = 2.0 * kMany * product.outputs * product.inputs / many;
    const double bytes = 2.0 * product.outputs * product.inputs / few;
    fmt::print(
        "{:<8} {:>6} x {:<6} #{:<3} id {:<4} tile {:<4} stages {:<3} cluster {:<3} inner {:<3} "
        "{:>8.1f} us "
        "{:>6.1f} TFLOP/s  {:>7.1f} us {:>6.0f} GB/s  {}\n",
        product.name, product.outputs, product.inputs, index++, number(algo, cuda::lt::kAlgoId),
        number(algo, cuda::lt::kAlgoTile), number(algo, cuda::lt::kAlgoStages),
        number(algo, static_cast<cuda::lt::AlgoAttribute>(8)),
        number(algo, static_cast<cuda::lt::AlgoAttribute>(7)), many * 1e6, flops / 1e12, few * 1e6,
        bytes / 1e9, bits == first ? "same bits" : "OTHER BITS");
  }
}

void run(const std::vector<std::int32_t>& sizes) {
  cuda::Gemms gemms;
  for (const std::int32_t h : sizes) {
    for (const Product& product :
         {Product{"kv", 2 * h, h, false}, Product{"q", h, h, false}, Product{"o", h, h, true},
          Product{"fc1", 4 * h, h, false}, Product{"fc2", h, 4 * h, true}}) {
      measure(gemms, product);
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
