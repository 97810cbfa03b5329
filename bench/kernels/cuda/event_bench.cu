// What an event costs the stream that records it or waits for it: 200 kernels of some 50 µs, each
// behind it, while the link rests and while copies from pinned memory come in without end. The limit is
// the kernel alone.
//
//   poise-cuda-event-bench

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <exception>
#include <functional>
#include <vector>

#include "kernels/cuda/check.h"

namespace poise::bench {
namespace {

constexpr int kKernels = 200;
constexpr int kMaxEvents = 4;                // before each
constexpr std::size_t kPiece = 72'000'000;   // bytes of a copy, as much as a mini-batch brings
constexpr int kPieces = 60;                  // more than the kernels take
constexpr std::int64_t kBegin = 40'000'000;  // ns until all is queued and others' events stand
constexpr auto check_cuda = [](cudaError_t error) { cuda::cuda_check(error, "the bench"); };

__global__ void rest(std::int64_t ns) {
  const auto now = [] {
    std::int64_t time;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
    return time;
  };
  for (const std::int64_t begin = now(); now() - begin < ns;) {
  }
}

__global__ void work(float* data) {
  float value = data[threadIdx.x];
  for (int i = 0; i < 20000; ++i) {
    value = value * 1.0001f + 0.5f;
  }
  data[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

class Bench {
 public:
  Bench() {
    for (cudaStream_t* stream : {&compute_, &copies_, &others_}) {
      check_cuda(cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking));
    }
    check_cuda(cudaMallocHost(&host_, kPiece));
    check_cuda(cudaMalloc(&device_, kPiece));
    check_cuda(cudaMalloc(&data_, std::size_t{1} << 20));
    check_cuda(cudaMemset(data_, 0, std::size_t{1} << 20));
    const auto make = [](std::vector<cudaEvent_t>& events, int count, unsigned flags) {
      events.resize(static_cast<std::size_t>(count));
      for (cudaEvent_t& event : events) {
        check_cuda(cudaEventCreateWithFlags(&event, flags));
      }
    };
    make(timed_, kKernels * kMaxEvents, cudaEventDefault);
    make(untimed_, kKernels, cudaEventDisableTiming);
    make(ends_, 2, cudaEventDefault);
  }

  // Microseconds of a kernel and of `before` (its number) together.
  double measure(bool copying, const std::function<void()>& prepare,
                 const std::function<void(int)>& before) {
    check_cuda(cudaDeviceSynchronize());
    rest<<<1, 1, 0, others_>>>(kBegin);
    prepare();
    for (int i = 0; copying && i < kPieces; ++i) {
      check_cuda(cudaMemcpyAsync(device_, host_, kPiece, cudaMemcpyHostToDevice, copies_));
    }
    rest<<<1, 1, 0, compute_>>>(kBegin + kBegin / 4);
    check_cuda(cudaEventRecord(ends_[0], compute_));
    for (int i = 0; i < kKernels; ++i) {
      before(i);
      work<<<132, 256, 0, compute_>>>(data_);
    }
    check_cuda(cudaEventRecord(ends_[1], compute_));
    check_cuda(cudaDeviceSynchronize());
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, ends_[0], ends_[1]));
    return static_cast<double>(ms) * 1e3 / kKernels;
  }

  void run() {
    const auto nothing = [] {};
    const auto record = [&](const std::vector<cudaEvent_t>& events, int each) {
      return [&events, each, this](int i) {
        for (int k = 0; k < each; ++k) {
          check_cuda(cudaEventRecord(events[static_cast<std::size_t>(i * each + k)], compute_));
        }
      };
    };
    const auto others = [&](const std::vector<cudaEvent_t>& events) {
      return [&events, this] {
        for (int i = 0; i < kKernels; ++i) {
          check_cuda(cudaEventRecord(events[static_cast<std::size_t>(i)], others_));
        }
      };
    };
    const auto wait = [&](const std::vector<cudaEvent_t>& events) {
      return [&events, this](int i) {
        check_cuda(cudaStreamWaitEvent(compute_, events[static_cast<std::size_t>(i)], 0));
      };
    };
    std::printf("%-20s%12s%12s   µs a kernel\n", "before each kernel", "link rests", "link busy");
    const auto row = [&](const char* name, const std::function<void()>& prepare,
                         const std::function<void(int)>& before) {
      const double rests = measure(false, prepare, before), busy = measure(true, prepare, before);
      std::printf("%-20s%12.2f%12.2f\n", name, rests, busy);
    };
    row("nothing", nothing, [](int) {});
    row("1 timed", nothing, record(timed_, 1));
    row("2 timed", nothing, record(timed_, 2));
    row("4 timed", nothing, record(timed_, kMaxEvents));
    row("1 untimed", nothing, record(untimed_, 1));
    row("a wait, timed", others(timed_), wait(timed_));
    row("a wait, untimed", others(untimed_), wait(untimed_));
  }

 private:
  cudaStream_t compute_ = nullptr, copies_ = nullptr, others_ = nullptr;
  void *host_ = nullptr, *device_ = nullptr;
  float* data_ = nullptr;
  std::vector<cudaEvent_t> timed_, untimed_, ends_;
};

}  // namespace
}  // namespace poise::bench

int main() {
  try {
    poise::bench::Bench().run();
    return 0;
  } catch (const std::exception& problem) {
    std::fprintf(stderr, "%s\n", problem.what());
    return 1;
  }
}
