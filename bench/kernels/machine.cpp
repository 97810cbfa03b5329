// The ceilings: floating-point throughput from registers, memory bandwidth.

#include <fmt/core.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "bench/kernels/bench.h"
#include "kernels/cpu/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace poise::bench {
namespace {

constexpr int kChains = 12;  // more than latency times issue width
constexpr std::int64_t kSteps = 1 << 20;
constexpr std::size_t kWords = std::size_t{32} << 20;  // 256 MiB
constexpr std::size_t kItemWords = std::size_t{1} << 18;

#if defined(__x86_64__)
// Returns lanes per operation; `sink` keeps the work from being optimised away.
__attribute__((target("avx512f"))) int spin_avx512(float* sink) {
  __m512 sum[kChains];
  for (__m512& chain : sum) {
    chain = _mm512_set1_ps(1.0f);
  }
  const __m512 x = _mm512_set1_ps(0.999f);
  for (std::int64_t i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) {
      sum[c] = _mm512_fmadd_ps(sum[c], x, x);
    }
  }
  for (const __m512& chain : sum) {
    *sink += _mm512_cvtss_f32(chain);
  }
  return 16;
}
__attribute__((target("avx2,fma"))) int spin_avx2(float* sink) {
  __m256 sum[kChains];
  for (__m256& chain : sum) {
    chain = _mm256_set1_ps(1.0f);
  }
  const __m256 x = _mm256_set1_ps(0.999f);
  for (std::int64_t i = 0; i < kSteps; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) {
      sum[c] = _mm256_fmadd_ps(sum[c], x, x);
    }
  }
  for (const __m256& chain : sum) {
    *sink += _mm256_cvtss_f32(chain);
  }
  return 8;
}
#endif
int spin_portable(float* sink) {
  float sum[kChains];
  std::fill_n(sum, kChains, 1.0f);
  for (std::int64_t i = 0; i < kSteps; ++i) {
    for (float& chain : sum) {
      chain = std::fma(chain, 0.999f, 0.999f);
    }
  }
  for (const float chain : sum) {
    *sink += chain;
  }
  return 1;
}

int spin(float* sink) {
  switch (cpu::active_isa()) {
#if defined(__x86_64__)
    case cpu::Isa::avx512:
      return spin_avx512(sink);
    case cpu::Isa::avx2:
      return spin_avx2(sink);
#endif
    default:
      return spin_portable(sink);
  }
}

}  // namespace

LoadersMemory::LoadersMemory(std::int64_t bytes)
    : segment_([bytes] {
        static int made = 0;
        return Segment::create(
            segment_name(fmt::format("bench{}", getpid()), fmt::format("memory-{}", ++made)),
            {bytes});
      }()) {}

namespace {
clockid_t clock_id = CLOCK_MONOTONIC;
}  // namespace

void use_clock_of(int threads) {
  clock_id = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
}

double now() {
  timespec time{};
  clock_gettime(clock_id, &time);
  return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

double read_speed(const std::byte* data, std::int64_t bytes, cpu::Workers& workers,
                  double for_seconds) {
  const auto* memory = reinterpret_cast<const std::uint64_t*>(data);
  const auto items = bytes / static_cast<std::int64_t>(kItemWords * 8);
  const double seconds = best_seconds(
      [&] {
        workers.parallel_for(items, [&](std::int64_t item, int) {
          const std::uint64_t* words = memory + static_cast<std::size_t>(item) * kItemWords;
          std::uint64_t sum = 0;
          for (std::size_t i = 0; i < kItemWords; ++i) {
            sum += words[i];
          }
          volatile std::uint64_t keep = sum;
          (void)keep;
        });
      },
      for_seconds);
  return static_cast<double>(items) * kItemWords * 8 / seconds;
}

Ceilings measure_ceilings(cpu::Workers& workers) {
  constexpr double kSeconds = 1.5;  // long enough to meet a quiet moment
  Ceilings ceilings{};
  const int threads = workers.threads();
  std::vector<float> sinks(static_cast<std::size_t>(threads) * 16);
  int lanes = 0;
  double seconds = best_seconds(
      [&] {
        workers.parallel_for(threads, [&](std::int64_t item, int) {
          const int count = spin(&sinks[static_cast<std::size_t>(item) * 16]);
          if (item == 0) {
            lanes = count;
          }
        });
      },
      kSeconds);
  ceilings.flops = 2.0 * kChains * static_cast<double>(kSteps) * lanes * threads / seconds;

  const LoadersMemory source(kWords * 8), target(kWords * 8);
  std::memset(source.data(), 1, kWords * 8);
  std::memset(target.data(), 2, kWords * 8);
  ceilings.read_bytes = read_speed(source.data(), kWords * 8, workers, kSeconds);
  seconds = best_seconds(
      [&] {
        workers.parallel_for(kWords / kItemWords, [&](std::int64_t item, int) {
          const std::size_t at = static_cast<std::size_t>(item) * kItemWords;
          std::memcpy(target.data() + at * 8, source.data() + at * 8, kItemWords * 8);
        });
      },
      kSeconds);
  ceilings.copy_bytes = static_cast<double>(kWords) * 8 / seconds;
  return ceilings;
}

void print_flops(const std::string& name, double seconds, double flops, const Ceilings& ceilings) {
  fmt::print("{:<46} {:>10.1f} us {:>8.1f} GFLOP/s {:>5.1f} %\n", name, seconds * 1e6,
             flops / seconds * 1e-9, 100 * flops / seconds / ceilings.flops);
}

void print_bytes(const std::string& name, double seconds, double bytes, double ceiling) {
  fmt::print("{:<46} {:>10.1f} us {:>8.1f} GB/s    {:>5.1f} %\n", name, seconds * 1e6,
             bytes / seconds * 1e-9, 100 * bytes / seconds / ceiling);
}

}  // namespace poise::bench
