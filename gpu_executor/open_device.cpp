#include "gpu_executor/open_device.h"

#include <sched.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <cmath>
#include <optional>

#include "common/trouble.h"
#include "gpu_executor/cpu/cpu_device.h"
#ifdef POISE_CUDA
#include "gpu_executor/cuda/cuda_device.h"
#endif

namespace poise {
namespace {

constexpr int kMaxThreads = 256;

int usable_cores() {
  cpu_set_t cores;
  CPU_ZERO(&cores);
  return sched_getaffinity(0, sizeof cores, &cores) == 0 ? std::max(1, CPU_COUNT(&cores)) : 1;
}

void check_speed(const char* name, double speed) {
  if (!std::isfinite(speed) || speed < 0) {
    fail("--{} is {}: it must be a positive number, or 0 for no limit", name, speed);
  }
}

#ifdef POISE_CUDA
std::optional<std::string> missing_cuda() { return cuda_is_missing(); }
#else
std::optional<std::string> missing_cuda() { return "this build has no CUDA"; }
std::unique_ptr<Device> open_cuda_device(int, bool) {
  fail("--device cuda: this build has no CUDA; use --device cpu, or build where nvcc is found");
}
#endif

}  // namespace

std::unique_ptr<Device> open_device(const DeviceOptions& options) {
  if (options.device != "cpu" && options.device != "auto" && options.device != "cuda") {
    fail("--device must be auto, cpu or cuda, not {}", options.device);
  }
  if (options.threads < 0 || options.threads > kMaxThreads) {
    fail("--threads is {}: it must be 1 to {}", options.threads, kMaxThreads);
  }
  check_speed("link-gbps", options.link_gbps);
  check_speed("compute-gflops", options.compute_gflops);
  if (options.host_threads < 0 || options.host_threads > kMaxThreads) {
    fail("--host-threads is {}: it must be 1 to {}", options.host_threads, kMaxThreads);
  }
  check_speed("host-gbps", options.host_gbps);
  std::optional<std::string> why;
  if (options.device == "cuda" || (options.device == "auto" && !(why = missing_cuda()))) {
    if (options.host_gbps > 0) {
      fail(
          "--host-gbps: only the CPU device rehearses host cores of a set speed; leave it out, or "
          "use --device cpu");
    }
    // One core is left for who queues and plans.
    const int most = std::clamp(usable_cores() - 1, 1, kMaxThreads);
    const bool given = options.host_threads > 0;
    std::unique_ptr<Device> device = open_cuda_device(given ? options.host_threads : most, given);
    spdlog::info("device: {}", device->name());
    return device;
  }
  std::unique_ptr<Device> device = open_cpu_device(
      {.threads = options.threads > 0 ? options.threads : std::min(usable_cores(), kMaxThreads),
       .link_bytes_per_s = options.link_gbps * 1e9,
       .compute_flops = options.compute_gflops * 1e9,
       .host_threads = options.host_threads,
       .host_bytes_per_s = options.host_gbps * 1e9});
  spdlog::info("device: {}{}", device->name(), why ? fmt::format(" (auto: {})", *why) : "");
  return device;
}

}  // namespace poise
