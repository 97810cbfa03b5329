#include "kernels/cuda/trial.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "common/liveness/progress.h"
#include "common/trouble.h"
#include "kernels/cuda/check.h"

namespace poise::cuda {
namespace {

constexpr std::int64_t kSums = 1 << 20;
constexpr int kLaunches = 4;  // the first one also loads code

class Event {
 public:
  Event() { cuda_check(cudaEventCreate(&event_), "a trial's time"); }
  ~Event() { static_cast<void>(cudaEventDestroy(event_)); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) {
    cuda_check(cudaEventRecord(event_, stream), "a trial's time");
  }
  // Waits for it.
  Seconds since(const Event& other) const {
    float milliseconds = 0;
    cuda_check(cudaEventSynchronize(event_), "a trial's time");
    cuda_check(cudaEventElapsedTime(&milliseconds, other.event_, event_), "a trial's time");
    return {static_cast<double>(milliseconds) / 1e3};
  }

 private:
  cudaEvent_t event_ = nullptr;
};

// Of either sign, with all bits of their mantissas at random: between 1/2 and 1.
std::vector<std::byte> random_numbers(DType dtype, Bytes bytes, std::mt19937& random) {
  std::vector<std::byte> rows(static_cast<std::size_t>(bytes.n));
  const auto fill = [&](auto sign, auto mantissa, auto half) {
    using Number = decltype(half);
    for (std::size_t at = 0; at < rows.size(); at += sizeof(Number)) {
      const auto number = static_cast<Number>((random() & (sign | mantissa)) | half);
      std::memcpy(rows.data() + at, &number, sizeof number);
    }
  };
  switch (dtype) {
    case DType::float32:
      fill(0x80000000u, 0x7fffffu, std::uint32_t{0x3f000000u});
      break;
    case DType::float16:
      fill(0x8000u, 0x3ffu, std::uint16_t{0x3800u});
      break;
    case DType::bfloat16:
      fill(0x8000u, 0x7fu, std::uint16_t{0x3f00u});
      break;
  }
  return rows;
}

// What comes of outputs that begin as `before`.
std::vector<std::byte> outputs(const Trial& trial, const void* in,
                               const std::vector<std::byte>& before, const Trial::Way& way) {
  std::vector<std::byte> values(before.size());
  void* out = static_cast<std::byte*>(trial.scratch) + trial.in_bytes().n;
  cuda_check(
      cudaMemcpyAsync(out, before.data(), before.size(), cudaMemcpyHostToDevice, trial.stream),
      "beginning a trial's sums");
  way(in, out);
  cuda_check(
      cudaMemcpyAsync(values.data(), out, values.size(), cudaMemcpyDeviceToHost, trial.stream),
      "reading a trial's sums");
  cuda_check(cudaStreamSynchronize(trial.stream), "a trial of two algorithms");
  return values;
}

}  // namespace

Seconds time_of(const Trial& trial, const Trial::Way& way) {
  check(trial.rows > 0 && trial.fits(), "a trial has room for its rows");
  Event begin, end;
  Seconds shortest{std::numeric_limits<double>::infinity()};
  const std::int64_t used = trial.in_bytes().n + trial.out_bytes().n;
  for (int i = 0; i < kLaunches; ++i) {
    // Clears the cache of the previous launch's data: in a run, a weight comes from memory.
    cuda_check(
        cudaMemsetAsync(static_cast<std::byte*>(trial.scratch) + used, 0,
                        static_cast<std::size_t>(trial.scratch_bytes.n - used), trial.stream),
        "clearing a trial's scratch");
    begin.record(trial.stream);
    way(trial.scratch, static_cast<std::byte*>(trial.scratch) + trial.in_bytes().n);
    end.record(trial.stream);
    shortest = std::min(shortest, end.since(begin));
    note_progress();
  }
  return shortest;
}

bool same_bits(const Trial& trial, const Trial::Way& one, const Trial::Way& other) {
  check(trial.rows > 0 && trial.fits(), "a trial has room for its rows");
  std::mt19937 random(1);                                // the same rows in every trial
  const std::int64_t numbers = trial.out_bytes().n / 4;  // no fewer than there are sums of 32 bits
  for (std::int64_t compared = 0; compared < kSums; compared += numbers) {
    const std::vector<std::byte> rows = random_numbers(trial.in_dtype, trial.in_bytes(), random);
    const std::vector<std::byte> before =
        trial.adds ? random_numbers(DType::float32, trial.out_bytes(), random)
                   : std::vector<std::byte>(static_cast<std::size_t>(trial.out_bytes().n));
    cuda_check(cudaMemcpyAsync(trial.scratch, rows.data(), rows.size(), cudaMemcpyHostToDevice,
                               trial.stream),
               "a trial's rows");
    note_progress();
    if (outputs(trial, trial.scratch, before, one) !=
        outputs(trial, trial.scratch, before, other)) {
      return false;
    }
  }
  return true;
}

}  // namespace poise::cuda
