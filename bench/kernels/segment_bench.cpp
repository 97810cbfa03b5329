// What memory for weights and pools costs: reserved, touched first by who made it and by another who attaches, and given back.
// With the pages that the kernel gives, and then with small ones alone.

#include <fmt/core.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <chrono>
#include <optional>

#include "bench/kernels/bench.h"

namespace poise::bench {
namespace {

constexpr Bytes kSize = kGiB * 4;
constexpr int kRounds = 3;

void touch(const Segment& segment, bool writes) {
  for (std::int64_t at = 0; at < segment.size().n; at += 4096) {
    volatile std::byte& byte = segment.data()[at];
    if (writes) {
      byte = std::byte{1};
    } else {
      static_cast<void>(static_cast<std::byte>(byte));
    }
  }
}

void measure() {
  const std::string name = segment_name(fmt::format("bench{}", getpid()), "segment");
  auto last = std::chrono::steady_clock::now();
  const auto lap = [&last] {
    const auto before = last;
    last = std::chrono::steady_clock::now();
    return std::chrono::duration<double>(last - before).count();
  };
  std::optional<Segment> made(Segment::create(name, kSize));
  const double reserved = lap();
  touch(*made, true);
  const double touched = lap();
  std::optional<Segment> other(Segment::attach(name, Access::read_only));
  touch(*other, false);
  const double attached = lap();
  const double huge = static_cast<double>(made->huge().n) / static_cast<double>(kSize.n);
  unlink_segment(name);
  other.reset();
  made.reset();
  fmt::print(
      "segment of 4 GiB, {:3.0f} % in huge pages: reserved {:.2f} s, touched {:.2f}, by another "
      "{:.2f}, given back {:.2f}\n",
      100 * huge, reserved, touched, attached, lap());
}

}  // namespace

void bench_segment(cpu::Workers&, const Ceilings&) {
  for (const bool small : {false, true}) {
    prctl(PR_SET_THP_DISABLE, small ? 1 : 0, 0, 0, 0);
    for (int round = 0; round < kRounds; ++round) {
      measure();
    }
  }
  prctl(PR_SET_THP_DISABLE, 0, 0, 0, 0);
}

}  // namespace poise::bench
